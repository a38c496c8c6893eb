"""Local search: hill climbing on shapes of warm-up, and swaps of neighbouring steps in complete orders.

Strategy of `swap`. From the last step of the rank with the longest span, its critical path leads back to its first
step: each step on it started the moment the one before it ended. Only swapping two steps of one rank within that path
can shorten it (as in job-shop scheduling; Van Laarhoven, Aarts and Lenstra, 1992).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from echelon.pipeline.plan.action import Place
from echelon.pipeline.search.greedy import Shape
from echelon.pipeline.search.problem import Problem
from echelon.pipeline.search.weight_placement import Key, maker_of

Orders: TypeAlias = Sequence[Sequence[Key]]
"""Complete orders: for each rank all of its steps, W included, in order."""


class Replayed(NamedTuple):
    """Start and end of each step of complete orders."""

    starts: list[list[int]]
    ends: list[list[int]]

    @property
    def spans(self) -> list[int]:
        """For each rank, the time from its first start to its last end."""
        return [ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True)]


def replay(problem: Problem, orders: Orders) -> Replayed | None:
    """Returns the times of complete orders, in whole numbers. None if they deadlock."""
    # Works on keys and whole numbers, unlike `play` of the simulator: a search replays thousands of orders.
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


def climb(shape: Shape, score: Callable[[Shape], tuple[int, int] | None]) -> None:
    """Climbs from a shape to better ones by one forward more or less on some neighbouring ranks, until none is better.

    The changed ranks are all ranks, then halves, quarters and so on down to single ranks.

    Args:
        shape: The start.
        score: Returns the score of a shape, lower is better. None ends the climb.
    """
    best = score(shape)
    improved = True
    while improved and best is not None:
        improved = False
        for window in _windows(len(shape[0])):
            for row in range(len(shape)):
                for change in (1, -1):
                    changed = _changed(shape, row, window, change)
                    new = score(changed)
                    if new is None:
                        return
                    if new < best:
                        shape, best, improved = changed, new, True


def _windows(num_ranks: int) -> Iterator[range]:
    size = num_ranks
    while size:
        for first in range(0, num_ranks, size):
            yield range(first, min(first + size, num_ranks))
        size //= 2


def _changed(shape: Shape, row: int, window: range, change: int) -> Shape:
    rows = list(shape)
    rows[row] = tuple(value + change if rank in window else value for rank, value in enumerate(rows[row]))
    return tuple(rows)


def swap(problem: Problem, orders: Orders, tries: int) -> tuple[tuple[Key, ...], ...]:
    """Swaps neighbouring steps as long as that helps, and returns orders that are no worse.

    Args:
        problem: The problem that the orders solve. They fit its limits.
        orders: Complete orders to begin with.
        tries: Most swaps to try.
    """
    current = [list(order) for order in orders]
    played = replay(problem, current)
    assert played is not None
    # All spans, the longest first: with several ranks of the longest span, a swap that shortens one of them counts.
    best = sorted(played.spans, reverse=True)
    found = True
    while found:
        found = False
        for rank, index in _pairs(problem, current, played):
            if tries <= 0:
                break
            order = current[rank]
            order[index], order[index + 1] = order[index + 1], order[index]
            # The cheap test first: a swap that breaks a rule needs no replay, and does not count as a try.
            if _is_allowed(problem, rank, order, index):
                tries -= 1
                new = replay(problem, current)
                if new is not None and sorted(new.spans, reverse=True) < best:
                    # The swap moved the critical path, so its pairs are found anew.
                    played, best, found = new, sorted(new.spans, reverse=True), True
                    break
            order[index], order[index + 1] = order[index + 1], order[index]
    return tuple(map(tuple, current))


def _pairs(problem: Problem, orders: Orders, played: Replayed) -> Iterator[Place]:
    """Yields the first of each two neighbours on the critical path of the longest span, from its end to its start."""
    spans = played.spans
    rank = spans.index(max(spans))
    began, index = played.starts[rank][0], len(orders[rank]) - 1
    places = {key: Place(rank, index) for rank, order in enumerate(orders) for index, key in enumerate(order)}
    while played.starts[rank][index] > began or index:
        start = played.starts[rank][index]
        # Whole numbers, so equality tells reliably whether the step waited for the one before it.
        if index and played.ends[rank][index - 1] == start:
            index -= 1
            yield Place(rank, index)
            continue
        maker = places.get(maker_of(*orders[rank][index], problem.num_stages))
        if maker is None or played.ends[maker.rank][maker.position] <= began:
            return
        rank, index = maker


def _is_allowed(problem: Problem, rank: int, order: Sequence[Key], index: int) -> bool:
    """Whether the two steps at `index`, just swapped, are independent and the rank still fits its limit."""
    first, second = order[index], order[index + 1]
    # F, I and W of one stage and microbatch have a fixed order.
    if first[1:] == second[1:]:
        return False
    held = 0
    for kind, stage, _ in order[: index + 2]:
        if kind == "F":
            held += problem.activation[stage]
            most = held
        else:
            most = held + (problem.recomputed[stage] if kind == "I" else 0)
            held -= problem.kept[stage] if kind == "W" else problem.activation[stage] - problem.kept[stage]
        if most > problem.limits[rank]:
            return False
    return True
