"""Arrangement of two timelines in one picture: their order and their scales."""

from __future__ import annotations

from dataclasses import replace

from echelon.timeline.timeline import Timeline
from echelon.timeline.words import is_measured

# Two timelines whose work differs by at most this factor are assumed to be in the same unit.
_SAME_UNIT = 1.5


def planned_first(timeline: Timeline, against: Timeline | None) -> list[Timeline]:
    """Returns the timelines of a picture from top to bottom: a measured run is below a planned one.

    A plan whose work is about that of a run in seconds is taken to be in seconds as well.
    """
    if against is None:
        return [timeline]
    swapped = is_measured(against) and not is_measured(timeline)
    both = [timeline, against] if swapped else [against, timeline]
    if _have_same_unit(both) and "s" in (timeline.unit, against.unit):
        return [replace(each, unit="s") for each in both]
    return both


def lengths(timelines: list[Timeline]) -> list[float]:
    """Returns the time that each axis shows.

    Both axes are equal if the work is about the same. Otherwise the units differ, such as a plan that counts forwards
    and a measured run in seconds. Then equal work is equally wide, and only idle time differs.
    """
    makespans = [float(timeline.makespan) for timeline in timelines]
    work = _work(timelines)
    if not all(work):
        return [makespan or 1.0 for makespan in makespans]
    if _have_same_unit(timelines):
        return [max(makespans)] * len(makespans)
    stretch = max(makespan / busy for makespan, busy in zip(makespans, work, strict=True))
    return [busy * stretch for busy in work]


def _work(timelines: list[Timeline]) -> list[float]:
    return [float(max(timeline.busy, default=0)) for timeline in timelines]


def _have_same_unit(timelines: list[Timeline]) -> bool:
    if all(timeline.unit == "s" for timeline in timelines):
        return True
    work = _work(timelines)
    return 0 < max(work) <= _SAME_UNIT * min(work)
