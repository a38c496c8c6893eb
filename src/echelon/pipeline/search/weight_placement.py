"""Placement of W in a skeleton (the order of F and I on each rank), where each costs least.

A rank that would wait for its next F or I runs as many W as fit the gap. If one more W would make it late, it waits
instead, as long as it has not waited longer, in total, than the rank that has waited most. That rank decides the
longest span, so the wait is free. A rank without room for its next F runs W until there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

from echelon.pipeline.plan.action import Action, Kind, Step, actions_of
from echelon.pipeline.search.problem import Problem

Key: TypeAlias = tuple[Kind, int, int]
"""Kind, stage and microbatch. A plain tuple is cheaper to create than an `Action`."""

Skeleton: TypeAlias = Sequence[Sequence[Key]]
"""Order of F and I on each rank, without W."""


class Filled(NamedTuple):
    """Complete orders with their longest span, in whole numbers."""

    span: int
    orders: tuple[tuple[Key, ...], ...]
    waits: tuple[int, ...]
    """Idle time of each rank between its first start and its last end."""


def to_actions(orders: Sequence[Sequence[Key]]) -> tuple[tuple[Action, ...], ...]:
    """Converts complete orders to the actions of a schedule."""
    return tuple(tuple(Action(stage, kind, microbatch) for kind, stage, microbatch in order) for order in orders)


def skeleton_of(orders: Sequence[Sequence[Step]]) -> Skeleton:
    """Returns the orders of a schedule without W. A fused backward becomes an I."""
    return [
        [
            ("F" if kind == "F" else "I", stage, microbatch)
            for step in order
            for stage, kind, microbatch in actions_of(step)
            if kind != "W"
        ]
        for order in orders
    ]


class Filler:
    """State of all ranks while actions are appended to their orders one by one.

    Args:
        problem: The problem to solve.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._longest_wait = 0
        """Total wait that is free for every rank: the longest of any rank so far."""
        count = problem.num_ranks
        self._free = [0] * count
        self._held = [0] * count
        self._waits = [0] * count
        self._first: list[int | None] = [None] * count
        self._orders: list[list[Key]] = [[] for _ in range(count)]
        self._undone: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        self._next_weight = [0] * count
        # Arrival of the output of stage s at s + 1, and of the input gradient of stage s at s. None: not known yet.
        blank: list[int | None] = [None] * problem.num_microbatches
        self._inputs = [list(blank) for _ in range(problem.num_stages + 1)]
        self._inputs[0] = [0] * problem.num_microbatches
        self._gradients = [list(blank) for _ in range(problem.num_stages + 1)]
        # Padded with 0: the last stage's backward uses its own output, and nothing uses the first stage's gradient.
        self._to_next = (*problem.transfer, 0)
        self._to_previous = (0, *problem.transfer)

    def free_at(self, rank: int) -> int:
        """Returns the end of the rank's last action."""
        return self._free[rank]

    def arrival(self, kind: Kind, stage: int, microbatch: int) -> int | None:
        """Returns the arrival of an F's or I's input. None if its producer is not placed yet."""
        if kind == "F":
            return self._inputs[stage][microbatch]
        if stage == self._problem.num_stages - 1:
            return self._inputs[stage + 1][microbatch]
        return self._gradients[stage + 1][microbatch]

    def put(self, kind: Kind, stage: int, microbatch: int, arrival: int) -> bool:
        """Appends an F or I to its rank's order, after the W that go before it. False if there is no room for it.

        W that were appended to make room stay in both cases.
        """
        problem = self._problem
        rank = problem.placement[stage]
        if kind == "F":
            duration, change = problem.forward[stage], problem.activation[stage]
            need = change
        else:
            duration, change = problem.backward_input[stage], problem.kept[stage] - problem.activation[stage]
            need = problem.recomputed[stage]
        limit = problem.limits[rank]
        # Only a W can make room: all other memory is freed by actions that come later in the order.
        while self._held[rank] + need > limit:
            if not self._put_weight(rank):
                return False
        self._fill_gap(rank, arrival)
        start = self._free[rank]
        if start < arrival:
            # Time before the first action is not idle: a span counts from the rank's own first start.
            if self._first[rank] is not None:
                self._waits[rank] += arrival - start
                self._longest_wait = max(self._longest_wait, self._waits[rank])
            start = arrival
        if self._first[rank] is None:
            self._first[rank] = start
        end = self._free[rank] = start + duration
        self._held[rank] += change
        self._orders[rank].append((kind, stage, microbatch))
        if kind == "F":
            self._inputs[stage + 1][microbatch] = end + self._to_next[stage]
        else:
            self._gradients[stage][microbatch] = end + self._to_previous[stage]
            self._undone[rank].append((stage, microbatch))
        return True

    def finish(self) -> Filled:
        """Appends the remaining W and returns the complete orders."""
        spans = []
        for rank, first in enumerate(self._first):
            while self._put_weight(rank):
                pass
            spans.append(self._free[rank] - (first or 0))
        return Filled(max(spans), tuple(map(tuple, self._orders)), tuple(self._waits))

    def _fill_gap(self, rank: int, arrival: int) -> None:
        undone, weight = self._undone[rank], self._problem.backward_weight
        while (gap := arrival - self._free[rank]) > 0 and self._next_weight[rank] < len(undone):
            stage, _ = undone[self._next_weight[rank]]
            # A W that does not fit the gap is put off while waiting is free.
            if weight[stage] > gap and self._waits[rank] + gap <= self._longest_wait:
                return
            self._put_weight(rank)

    def _put_weight(self, rank: int) -> bool:
        index = self._next_weight[rank]
        if index == len(self._undone[rank]):
            return False
        stage, microbatch = self._undone[rank][index]
        self._next_weight[rank] = index + 1
        self._free[rank] += self._problem.backward_weight[stage]
        self._held[rank] -= self._problem.kept[stage]
        self._orders[rank].append(("W", stage, microbatch))
        return True


def fill(problem: Problem, skeleton: Skeleton) -> Filled | None:
    """Plays a skeleton and places its W. None if it does not fit the limits, or deadlocks."""
    filler = Filler(problem)
    position = [0] * problem.num_ranks
    waiting: dict[Key, int] = {}
    ready: list[tuple[int, int, int]] = []
    left = sum(map(len, skeleton))
    # The earliest action goes first, since `Filler` compares a rank's wait with the waits of all ranks so far.

    def enqueue(rank: int) -> None:
        if position[rank] < len(skeleton[rank]):
            kind, stage, microbatch = skeleton[rank][position[rank]]
            arrival = filler.arrival(kind, stage, microbatch)
            if arrival is None:
                waiting[maker_of(kind, stage, microbatch, problem.num_stages)] = rank
            else:
                heappush(ready, (max(arrival, filler.free_at(rank)), rank, arrival))

    for rank in range(problem.num_ranks):
        enqueue(rank)
    while ready:
        _, rank, arrival = heappop(ready)
        key = skeleton[rank][position[rank]]
        if not filler.put(*key, arrival):
            return None
        left -= 1
        position[rank] += 1
        enqueue(rank)
        other = waiting.pop(key, None)
        if other is not None:
            enqueue(other)
    return None if left else filler.finish()


def maker_of(kind: Kind, stage: int, microbatch: int, num_stages: int) -> Key:
    """Returns the action that makes the input of another. It does not exist for an F of the first stage."""
    if kind == "W":
        return ("I", stage, microbatch)
    if kind == "F":
        return ("F", stage - 1, microbatch)
    if stage == num_stages - 1:
        return ("F", stage, microbatch)
    return ("I", stage + 1, microbatch)
