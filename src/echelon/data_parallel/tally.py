"""What a rank has done since gradients were last reduced."""

from __future__ import annotations

import torch

from echelon.backends.memory import new_tensor
from echelon.data_parallel.summary import Summary
from echelon.errors import CollectiveMismatch
from echelon.group import ProcessGroup


class Tally:
    """Counts forwards, optimizer steps and samples, so that ranks that pair different iterations are told."""

    def __init__(self, counts_steps: bool = True) -> None:
        """Begins at 0; steps stay there unless `counts_steps`."""
        self._counts = True
        self._counts_steps = counts_steps
        self._called_steps = self.num_forwards = self.num_samples = 0
        self.compiled_steps = new_tensor((), torch.int64).zero_()
        """To which compiled code adds 1 for each optimizer step."""

    @property
    def num_steps(self) -> int:
        """Steps of optimizers, compiled ones too."""
        return self._called_steps + int(self.compiled_steps) if self._counts_steps else 0

    def note_step(self) -> None:
        """Counts a step of an optimizer that is not compiled."""
        self._called_steps += 1

    def forget(self) -> None:
        """Begins anew."""
        self._counts = True
        self._called_steps = self.num_forwards = self.num_samples = 0
        self.compiled_steps.zero_()

    def excuse(self) -> None:
        """Leaves forwards and steps of this rank out of the next comparison."""
        self._counts = False

    def summary(self, having: list[bool], came: list[int], *, beside: bool) -> Summary:
        """Returns what the other ranks are told; of gradients, who has them and in which order they came."""
        num_forwards = self.num_forwards if self._counts else None
        return Summary.of(having, num_forwards, self.num_samples, came, self.num_steps, beside=beside)

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
