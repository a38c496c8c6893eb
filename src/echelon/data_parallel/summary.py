"""Summary of a gradient reduction: integers of each rank that are added up over all ranks by one all_reduce.

It says which gradients each rank had, after how many forwards, of how many samples, and how many optimizer steps. So
ranks detect that they pair different iterations, or compute the same ones, and weigh their gradients by samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from echelon.backends.memory import new_tensor
from echelon.errors import CollectiveMismatch, UnsupportedOp
from echelon.group.group import ProcessGroup
from echelon.wording import counted


class Summary(NamedTuple):
    """Numbers of one rank, or their sums over all ranks."""

    num_counting: int
    """Number of ranks that reached this reduction by a backward, and so count their forwards."""
    num_forwards: int
    """Number of forwards since the last reduction."""
    forwards_squared: int
    """Square of the number of forwards of a rank, for `agrees`."""
    num_steps: int
    """Number of optimizer steps since the last reduction."""
    steps_squared: int
    """Square of the number of steps of a rank, for `agrees`."""
    num_samples: int
    """Number of samples of the forwards."""
    batch: int
    """Number that stands for the batches of all forwards, in the first two reductions. 0 if one is not known."""
    batch_squared: int
    """Square of that of a rank, for `has_equal_batches`."""
    num_beside: int
    """Number of ranks that have an idle core for reductions overlapped with backward."""
    num_having: tuple[int, ...]
    """Per parameter, the number of ranks that have a gradient."""
    places: tuple[int, ...]
    """Per parameter, the position of its gradient in the order of arrival, from 1. 0 if no rank reports the order."""

    @classmethod
    def read(cls, numbers: Sequence[int]) -> Summary:
        """Returns the summary with these `numbers()`."""
        first = len(cls._fields) - 2
        half = first + (len(numbers) - first) // 2
        return cls._make([*numbers[:first], tuple(numbers[first:half]), tuple(numbers[half:])])

    def numbers(self) -> list[int]:
        """Returns all numbers in a row, for an all_reduce."""
        *counts, having, places = self
        return [*counts, *having, *places]

    def agrees(self) -> bool:
        """Whether all counting ranks have the same number of forwards, and of steps.

        By Cauchy and Schwarz, n times the sum of n squares is the square of the sum only if all are equal.
        """
        # So sums are enough, and no rank has to gather the counts of all others.
        return (
            self.forwards_squared * self.num_counting == self.num_forwards**2
            and self.steps_squared * self.num_counting == self.num_steps**2
        )

    def has_equal_batches(self) -> bool:
        """Whether several ranks count, the batch of each is known, and all are equal."""
        return self.batch > 0 and self.num_counting > 1 and self.batch_squared * self.num_counting == self.batch**2

    def order(self) -> list[int]:
        """Returns the parameters in the order in which their gradients came. Empty if no rank reported it."""
        told = [(place, parameter) for parameter, place in enumerate(self.places) if place]
        return [parameter for _, parameter in sorted(told)]


class StepCounts:
    """Counters of this rank's forwards, optimizer steps and samples since the last reduction."""

    def __init__(self, counts_steps: bool = True) -> None:
        """Starts at 0. The number of steps stays 0 without `counts_steps`."""
        self._counts = True
        self._counts_steps = counts_steps
        self.num_called_steps = self.num_forwards = self.num_samples = 0
        self.batch: int | None = None
        """Number that stands for the batches of all forwards. 0 if one is not known, None if there was no forward."""
        # A tensor, because code of torch.compile can add to one, and cannot change an attribute of this object.
        self.compiled_steps = new_tensor((), torch.int64).zero_()
        """Counter to which compiled code adds 1 for each optimizer step."""

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps, compiled ones included."""
        return self.num_called_steps + int(self.compiled_steps) if self._counts_steps else 0

    def forget(self) -> None:
        """Resets all counters to 0. Every rank must do the same."""
        self._counts = True
        self.num_called_steps = self.num_forwards = self.num_samples = 0
        self.batch = None
        self.compiled_steps.zero_()

    def exempt(self) -> None:
        """Excludes forwards and steps of this rank from the next comparison."""
        self._counts = False

    def summary(self, having: list[bool], came: list[int], *, beside: bool) -> Summary:
        """Returns this rank's summary for the other ranks.

        Args:
            having: per parameter, whether this rank has a gradient.
            came: parameters in the order in which their gradients came, each once or more. Empty on all ranks but one.
            beside: whether this rank has an idle core for reductions.
        """
        forwards, steps = (self.num_forwards, self.num_steps) if self._counts else (0, 0)
        batch = self.batch or 0 if self._counts else 0
        place = {parameter: when for when, parameter in enumerate(dict.fromkeys(came), start=1)}
        return Summary(
            num_counting=int(self._counts),
            num_forwards=forwards,
            forwards_squared=forwards**2,
            num_steps=steps,
            steps_squared=steps**2,
            num_samples=self.num_samples,
            batch=batch,
            batch_squared=batch**2,
            num_beside=int(beside),
            num_having=tuple(map(int, having)),
            places=tuple(place.get(parameter, 0) for parameter in range(len(having))),
        )

    def __str__(self) -> str:
        if not self._counts:
            return ""
        return f"{counted(self.num_forwards, 'forward')} and {counted(self.num_steps, 'optimizer step')}"


def mismatch(mine: str, group: ProcessGroup) -> CollectiveMismatch:
    """Returns the error for ranks whose counts differ. Blocks; every rank must call it.

    Args:
        mine: the counts of this rank, in words.
        group: the ranks.
    """
    # The summary holds sums only, so the error costs a collective of its own to name each rank's counts.
    told = [str(each) for each in group.all_gather_object(mine)]
    counts = "; ".join(f"rank {rank}: {each}" for rank, each in zip(group.ranks, told, strict=True) if each)
    return CollectiveMismatch(
        f"the ranks did not do the same since gradients were last reduced ({counts}): a rank skipped a backward; "
        "run it on all ranks or on none, or call sync_gradients() in its place"
    )


class SampleWeights:
    """Weights of the ranks by their numbers of samples, for `average="samples"`.

    A rank multiplies its gradients by its number of samples over the mean number of the previous reduction, which all
    ranks know. The result is rescaled by the actual mean. So values stay in the range of the gradients, and ranks with
    equal numbers multiply nothing. Only the first reduction needs a collective to learn the mean. The mean decides how
    results are rounded, so checkpoints store it.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.usual = 0.0
        """Mean number of samples per rank in the last reduction. 0 before the first. The same on every rank."""

    def expect(self, num_samples: int) -> None:
        """Prepares a reduction with this rank's number of samples. Blocks the first time."""
        if not self.usual:
            told = self._group.all_reduce(torch.tensor(num_samples, dtype=torch.float64, device="cpu"), "mean")
            self.usual = told.item() or 1.0

    def weigh(self, gradients: torch.Tensor, num_samples: int) -> None:
        """Multiplies this rank's gradients by its weight."""
        _scale(gradients, num_samples / self.usual)

    def rescale(self, reduced: Iterable[torch.Tensor], summary: Summary) -> None:
        """Rescales from the predicted mean number of samples to the actual one.

        Raises:
            UnsupportedOp: ranks have gradients, but none has a sample.
        """
        if summary.num_samples:
            expected, self.usual = self.usual, summary.num_samples / self._group.world_size
            for gradients in reduced:
                _scale(gradients, expected / self.usual)
        elif any(summary.num_having):
            raise UnsupportedOp(
                "average='samples', but no rank has samples: samples are the rows of the first tensor given to the "
                "model's forward, and count for its first backward; call the model so, add up the losses of a forward, "
                "or use average='ranks'"
            )


def _scale(gradients: torch.Tensor, factor: float) -> None:
    if factor == 0:
        gradients.zero_()  # the gradients of no samples may be NaN, and 0 times NaN is NaN
    elif factor != 1:
        gradients.mul_(factor)
