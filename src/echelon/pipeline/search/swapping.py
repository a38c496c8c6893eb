"""Betters complete orders: swaps two neighbours where they delay the rank that takes longest.

From the last step of that rank, the chain of steps that each started the moment another one ended leads back to its
first. Only swapping two steps of one rank within that chain can shorten it (as in job-shop scheduling; Van Laarhoven,
Aarts and Lenstra, 1992).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from echelon.pipeline.search.filling import Key
from echelon.pipeline.search.problem import Problem
from echelon.pipeline.search.replaying import Orders, Replayed, replay


class Place(NamedTuple):
    """A step of a rank."""

    rank: int
    position: int


def swap(problem: Problem, orders: Orders, tries: int) -> tuple[tuple[Key, ...], ...]:
    """Returns orders that are no worse.

    Args:
        problem: What they are for. They fit its limits.
        orders: What to begin with.
        tries: How many swaps to try at most.
    """
    current = [list(order) for order in orders]
    played = replay(problem, current)
    assert played is not None
    best = sorted(played.spans, reverse=True)
    found = True
    while found:
        found = False
        for rank, index in _pairs(problem, current, played):
            if tries <= 0:
                break
            order = current[rank]
            order[index], order[index + 1] = order[index + 1], order[index]
            if _is_allowed(problem, rank, order, index):
                tries -= 1
                new = replay(problem, current)
                if new is not None and sorted(new.spans, reverse=True) < best:
                    played, best, found = new, sorted(new.spans, reverse=True), True
                    break
            order[index], order[index + 1] = order[index + 1], order[index]
    return tuple(map(tuple, current))


def _pairs(problem: Problem, orders: Orders, played: Replayed) -> Iterator[Place]:
    """The first of each two neighbours in the chain, from the end of the longest rank's span back to its start."""
    spans = played.spans
    rank = spans.index(max(spans))
    began, index = played.starts[rank][0], len(orders[rank]) - 1
    makers = _Makers(problem, orders)
    while played.starts[rank][index] > began or index:
        start = played.starts[rank][index]
        if index and played.ends[rank][index - 1] == start:
            index -= 1
            yield Place(rank, index)
            continue
        maker = makers.of(orders[rank][index])
        if maker is None or played.ends[maker.rank][maker.position] <= began:
            return
        rank, index = maker


class _Makers:
    """Finds the step that makes what another one needs."""

    def __init__(self, problem: Problem, orders: Orders) -> None:
        self._last = problem.num_stages - 1
        self._places = {key: Place(rank, index) for rank, order in enumerate(orders) for index, key in enumerate(order)}

    def of(self, key: Key) -> Place | None:
        kind, stage, microbatch = key
        if kind == "F":
            return self._places[("F", stage - 1, microbatch)] if stage else None
        if kind == "W":
            return self._places[("I", stage, microbatch)]
        if stage == self._last:
            return self._places[("F", stage, microbatch)]
        return self._places[("I", stage + 1, microbatch)]


def _is_allowed(problem: Problem, rank: int, order: Sequence[Key], index: int) -> bool:
    """Whether the two steps at index, just swapped, do not need each other, and the rank still fits its limit."""
    first, second = order[index], order[index + 1]
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
