"""Betters a schedule by deciding where W go as if costs were a little different.

The filler looks one gap ahead. When W seem shorter, or transfers free, it waits less or does more of them early, and
that is sometimes better in the end. What comes out is played with the true costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from echelon.pipeline.search.filling import Filled, Key
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


def replay(problem: Problem, orders: Sequence[Sequence[Key]]) -> Filled:
    """Plays complete orders that are known to end with the true costs."""
    free, first, waits = [0] * problem.num_ranks, [-1] * problem.num_ranks, [0] * problem.num_ranks
    position = [0] * problem.num_ranks
    there: dict[Key, int] = {}
    last = problem.num_stages - 1
    to_next, to_previous = (*problem.transfer, 0), (0, *problem.transfer)
    again = list(range(problem.num_ranks))
    while again:
        rank = again.pop()
        order = orders[rank]
        while position[rank] < len(order):
            key = order[position[rank]]
            kind, stage, microbatch = key
            if kind == "W":
                free[rank] += problem.backward_weight[stage]
                position[rank] += 1
                continue
            arrival = 0 if kind == "F" and stage == 0 else there.get(key)
            if arrival is None:
                break
            if first[rank] < 0:
                first[rank] = max(arrival, 0)
            else:
                waits[rank] += max(0, arrival - free[rank])
            start = max(free[rank], arrival)
            position[rank] += 1
            if kind == "F":
                free[rank] = start + problem.forward[stage]
                made: Key = ("F", stage + 1, microbatch) if stage < last else ("I", last, microbatch)
                there[made] = free[rank] + to_next[stage]
            else:
                free[rank] = start + problem.backward_input[stage]
                made = ("I", stage - 1, microbatch)
                there[made] = free[rank] + to_previous[stage]
            if made[1] >= 0 and problem.placement[made[1]] != rank:
                again.append(problem.placement[made[1]])
    span = max(end - start for end, start in zip(free, first, strict=True))
    return Filled(span, tuple(map(tuple, orders)), tuple(waits))
