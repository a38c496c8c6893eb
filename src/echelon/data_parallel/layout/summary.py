"""What ranks tell each other of a reduction of gradients: whole numbers that are added up over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Summary(NamedTuple):
    """One rank's numbers, or their sums."""

    num_counting: int
    """Ranks that came to this reduction by a backward, and so count their forwards."""
    num_forwards: int
    """Forwards since the last reduction."""
    forwards_squared: int
    """The squares of those."""
    num_steps: int
    """Optimizer steps since the last reduction."""
    steps_squared: int
    """The squares of those."""
    num_samples: int
    """Samples of those forwards."""
    num_beside: int
    """Ranks that have a core left over for reductions beside backward."""
    num_having: tuple[int, ...]
    """Of each parameter: the ranks that have a gradient."""
    places: tuple[int, ...]
    """Of each parameter: when its gradient came, 1 for the first; 0 unless one rank tells of that."""

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
        """Makes that of one rank.

        Args:
            having: of each parameter, whether there is a gradient.
            num_forwards: since the last reduction; None: this rank does not count them, nor steps.
            num_samples: of those forwards.
            came: the parameters in the order in which their gradients came, each once or more; at most one rank tells.
            num_steps: of optimizers since the last reduction.
            beside: whether this rank has a core left over for reductions.
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
        """Takes the numbers apart again."""
        counting, forwards, forwards_squared, steps, steps_squared, samples, beside, *others = numbers
        half = len(others) // 2
        having, places = tuple(others[:half]), tuple(others[half:])
        return cls(counting, forwards, forwards_squared, steps, steps_squared, samples, beside, having, places)

    def numbers(self) -> list[int]:
        """Returns all numbers in a row, for adding up."""
        *counts, having, places = self
        return [*counts, *having, *places]

    def agrees(self) -> bool:
        """Says whether all ranks that count have the same number of forwards, and of steps.

        By Cauchy and Schwarz n times the sum of n squares is the square of the sum only if all are equal.
        """
        return (
            self.forwards_squared * self.num_counting == self.num_forwards**2
            and self.steps_squared * self.num_counting == self.num_steps**2
        )

    def order(self) -> list[int]:
        """Returns the parameters in the order in which their gradients came, those of which that was told."""
        told = [(place, parameter) for parameter, place in enumerate(self.places) if place]
        return [parameter for _, parameter in sorted(told)]
