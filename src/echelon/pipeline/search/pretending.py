"""Betters a schedule by deciding where W go as if costs were a little different.

The filler looks one gap ahead. When W seem shorter, or transfers free, it waits less or does more of them early, and
that is sometimes better in the end. What comes out is played with the true costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from echelon.pipeline.search.problem import Problem

_WEIGHTS = (Fraction(4, 5), Fraction(9, 10), Fraction(11, 10), Fraction(5, 4))
_TRANSFERS = (Fraction(1), Fraction(1, 2), Fraction(0), Fraction(2))


def pretences(problem: Problem) -> Iterator[Problem]:
    """Yields the problem with other times for W and transfers."""
    for transfer in _TRANSFERS:
        for weight in (*_WEIGHTS, Fraction(1)):
            if weight != 1 or transfer != 1:
                yield replace(
                    problem,
                    backward_weight=tuple(int(time * weight) for time in problem.backward_weight),
                    transfer=tuple(int(time * transfer) for time in problem.transfer),
                )
