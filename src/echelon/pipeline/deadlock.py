"""Finds ranks that would wait for each other for ever.

The schedule is played. A rank that stands still waits for one action of one rank, which stands still as well; so
following the waits from any of them leads into a circle. The circle is reported, one wait in it is granted, and the
schedule is played again, for there may be others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from echelon.pipeline.action import Action, Step, actions_of
from echelon.pipeline.cost import Costs
from echelon.pipeline.grid import Place, Problem, where
from echelon.pipeline.simulate import Need, play

if TYPE_CHECKING:
    from echelon.pipeline.schedule import Schedule

_MOST_CIRCLES = 8


class _Wait(NamedTuple):
    """A step that cannot start, what it needs, and the step that would make it."""

    step: Step
    place: Place
    need: Need
    maker: Action
    maker_place: Place


def find_circles(schedule: Schedule, orders: Sequence[Sequence[Step]], granted: Collection[Need]) -> Iterator[Problem]:
    """Yields a problem for each circle of waits, up to 8.

    Args:
        schedule: Its placement and sizes count.
        orders: To be played: actions that exist.
        granted: What no step waits for.
    """
    granted = set(granted)
    costs = Costs(0, 0, 0).per_stage(schedule.placement)
    for _ in range(_MOST_CIRCLES):
        ran = play(orders, schedule.placement, schedule.num_microbatches, costs, granted)
        standing = {rank: len(ends) for rank, ends in enumerate(ran.ends) if len(ends) < len(orders[rank])}
        if not standing:
            return
        circle = _circle(_waits(orders, standing, schedule.num_stages, granted))
        yield _problem(circle)
        granted.add(circle[0].need)


def _waits(
    orders: Sequence[Sequence[Step]], standing: dict[int, int], num_stages: int, granted: Collection[Need]
) -> dict[int, _Wait]:
    """What each rank that stands still waits for."""
    still_to_come = {
        (action.kind == "F", action.stage, action.microbatch): (action, (rank, index))
        for rank, position in standing.items()
        for index in range(len(orders[rank]) - 1, position - 1, -1)
        for action in actions_of(orders[rank][index])
        if action.kind != "W"
    }
    waits = {}
    for rank, position in standing.items():
        step = orders[rank][position]
        for stage, kind, microbatch in actions_of(step):
            is_forward = kind == "F"
            maker_stage = stage - 1 if is_forward else stage + 1
            need = Need("F" if is_forward else "B", stage, microbatch)
            maker = still_to_come.get((is_forward, maker_stage, microbatch))
            if kind != "W" and maker is not None and need not in granted and 0 <= maker_stage < num_stages:
                waits[rank] = _Wait(step, (rank, position), need, *maker)
    return waits


def _circle(waits: dict[int, _Wait]) -> list[_Wait]:
    """Follows the waits until a rank comes again."""
    path: list[int] = []
    rank = min(waits)
    while rank not in path:
        path.append(rank)
        rank = waits[rank].maker_place[0]
    return [waits[rank] for rank in path[path.index(rank) :]]


def _problem(circle: Sequence[_Wait]) -> Problem:
    places = tuple(place for wait in circle for place in (wait.place, wait.maker_place))
    if len(circle) == 1:
        wait = circle[0]
        text = f"{where(wait.step, wait.place)} comes before {where(wait.maker, wait.maker_place)}, which it needs"
        return Problem(text, places)
    waits = "; ".join(
        f"{where(wait.step, wait.place)} waits for {where(wait.maker, wait.maker_place)}" for wait in circle
    )
    return Problem(f"ranks wait for each other (deadlock): {waits}", places)
