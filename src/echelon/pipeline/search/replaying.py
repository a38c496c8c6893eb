"""Plays complete orders, W and all, in whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from echelon.pipeline.search.filling import Key
from echelon.pipeline.search.problem import Problem

Orders: TypeAlias = Sequence[Sequence[Key]]
"""For each rank all its steps, in order."""


class Replayed(NamedTuple):
    """Complete orders on the clock."""

    starts: list[list[int]]
    ends: list[list[int]]

    @property
    def spans(self) -> list[int]:
        """For each rank, the time from its first start to its last end."""
        return [ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True)]


def replay(problem: Problem, orders: Orders) -> Replayed | None:
    """Plays complete orders; None if ranks wait for each other for ever."""
    starts: list[list[int]] = [[] for _ in orders]
    ends: list[list[int]] = [[] for _ in orders]
    arrivals: dict[Key, int] = {("F", 0, microbatch): 0 for microbatch in range(problem.num_microbatches)}
    last = problem.num_stages - 1
    again = list(range(problem.num_ranks))
    while again:
        rank = again.pop()
        own_starts, own_ends = starts[rank], ends[rank]
        now = own_ends[-1] if own_ends else 0
        order = orders[rank]
        for index in range(len(own_ends), len(order)):
            key = order[index]
            kind, stage, microbatch = key
            if kind != "W":
                arrival = arrivals.get(key)
                if arrival is None:
                    break
                now = max(now, arrival)
            own_starts.append(now)
            if kind == "W":
                now += problem.backward_weight[stage]
            elif kind == "F":
                now += problem.forward[stage]
                if stage == last:
                    arrivals["I", last, microbatch] = now
                else:
                    arrivals["F", stage + 1, microbatch] = now + problem.transfer[stage]
                    again.append(problem.placement[stage + 1])
            else:
                now += problem.backward_input[stage]
                if stage:
                    arrivals["I", stage - 1, microbatch] = now + problem.transfer[stage - 1]
                    again.append(problem.placement[stage - 1])
            own_ends.append(now)
    if any(len(own) < len(order) for own, order in zip(ends, orders, strict=True)):
        return None
    return Replayed(starts, ends)
