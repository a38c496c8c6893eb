"""Summary of a gradient reduction: integers of each rank that are added up over all ranks by one all_reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
    num_beside: int
    """Number of ranks that have an idle core for reductions overlapped with backward."""
    num_having: tuple[int, ...]
    """Per parameter, the number of ranks that have a gradient."""
    places: tuple[int, ...]
    """Per parameter, the position of its gradient in the order of arrival, from 1. 0 if no rank reports the order."""

    @classmethod
    def of(
        cls,
        having: Sequence[bool],
        num_forwards: int | None,
        num_samples: int,
        came: Sequence[int] = (),
        num_steps: int = 0,
        *,
        beside: bool = True,
    ) -> Summary:
        """Returns the summary of one rank.

        Args:
            having: per parameter, whether this rank has a gradient.
            num_forwards: forwards since the last reduction. None: this rank counts neither forwards nor steps.
            num_samples: samples of these forwards.
            came: parameters in the order in which their gradients came, each once or more. Empty on all ranks but one.
            num_steps: optimizer steps since the last reduction.
            beside: whether this rank has an idle core for reductions.
        """
        counts = num_forwards is not None
        forwards = num_forwards or 0
        steps = num_steps if counts else 0
        place = {parameter: when for when, parameter in enumerate(dict.fromkeys(came), start=1)}
        places = tuple(place.get(parameter, 0) for parameter in range(len(having)))
        having_numbers = tuple(map(int, having))
        return cls(
            int(counts), forwards, forwards**2, steps, steps**2, num_samples, int(beside), having_numbers, places
        )

    @classmethod
    def read(cls, numbers: Sequence[int]) -> Summary:
        """Returns the summary with these `numbers()`."""
        counting, forwards, forwards_squared, steps, steps_squared, samples, beside, *others = numbers
        half = len(others) // 2
        having, places = tuple(others[:half]), tuple(others[half:])
        return cls(counting, forwards, forwards_squared, steps, steps_squared, samples, beside, having, places)

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

    def order(self) -> list[int]:
        """Returns the parameters in the order in which their gradients came. Empty if no rank reported it."""
        told = [(place, parameter) for parameter, place in enumerate(self.places) if place]
        return [parameter for _, parameter in sorted(told)]
