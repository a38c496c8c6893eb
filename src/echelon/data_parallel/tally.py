"""What a rank has done since gradients were last reduced."""

from __future__ import annotations

from echelon.data_parallel.summary import Summary
from echelon.errors import CollectiveMismatch
from echelon.group import ProcessGroup


class Tally:
    """Counts forwards, optimizer steps and samples, so that ranks that pair different iterations are told."""

    def __init__(self) -> None:
        self._counts = True
        self.num_forwards = self.num_steps = self.num_samples = 0

    def forget(self) -> None:
        """Begins anew."""
        self._counts = True
        self.num_forwards = self.num_steps = self.num_samples = 0

    def excuse(self) -> None:
        """Leaves forwards and steps of this rank out of the next comparison."""
        self._counts = False

    def summary(self, having: list[bool], came: list[int]) -> Summary:
        """Returns what the other ranks are told; of gradients, who has them and in which order they came."""
        return Summary.of(having, self.num_forwards if self._counts else None, self.num_samples, came, self.num_steps)

    def __str__(self) -> str:
        return f"{self.num_forwards} forwards, {self.num_steps} optimizer steps" if self._counts else ""


def mismatch(mine: str, group: ProcessGroup) -> CollectiveMismatch:
    """Returns the error for ranks whose tallies differ. Every rank must ask for it.

    Args:
        mine: the tally of this rank, in words.
        group: the ranks.
    """
    told = [str(each) for each in group.all_gather_object(mine)]
    counts = "; ".join(f"rank {rank} {each}" for rank, each in zip(group.ranks, told, strict=True) if each)
    return CollectiveMismatch(
        f"the ranks did not do the same since gradients were last reduced ({counts}): a rank skipped a backward; "
        "run it on all ranks or on none, or call sync_gradients() in its place"
    )
