"""Betters a schedule by deciding where W go as if costs were a little different.

The filler looks one gap ahead. When W seem shorter, or transfers free, it waits less or does more of them early, and
that is sometimes better in the end. What comes out is played with the true costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from echelon.pipeline.search.problem import Problem

# What W and transfers are taken to cost, as parts of what they do: the most helpful first.
_PRETENCES = (
    ("4/5", "1"),
    ("9/10", "1/2"),
    ("4/5", "0"),
    ("1", "0"),
    ("9/10", "1"),
    ("11/10", "1/2"),
    ("1", "2"),
    ("4/5", "1/2"),
    ("9/10", "0"),
    ("11/10", "1"),
    ("5/4", "1"),
    ("1", "1/2"),
)


def pretences(problem: Problem) -> Iterator[Problem]:
    """Yields the problem with other times for W and transfers."""
    for weight, transfer in _PRETENCES:
        yield replace(
            problem,
            backward_weight=_scaled(problem.backward_weight, Fraction(weight)),
            transfer=_scaled(problem.transfer, Fraction(transfer)),
        )


def _scaled(times: tuple[int, ...], part: Fraction) -> tuple[int, ...]:
    return tuple(int(time * part) for time in times)
