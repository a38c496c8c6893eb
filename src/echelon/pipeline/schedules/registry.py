"""The schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from echelon.errors import ScheduleError
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules.gpipe import gpipe
from echelon.pipeline.schedules.one_f_one_b import one_f_one_b


@dataclass(frozen=True)
class _Fixed:
    """A schedule that has a fixed number of stages per rank."""

    make: Callable[[int, int], Schedule]
    num_chunks: int = 1


@dataclass(frozen=True)
class _Chunked:
    """A schedule for any number of stages per rank."""

    make: Callable[[int, int, int], Schedule]


_SCHEDULES: dict[str, _Fixed | _Chunked] = {
    "gpipe": _Fixed(gpipe),
    "1f1b": _Fixed(one_f_one_b),
}


def names() -> tuple[str, ...]:
    """Returns the names that `build` knows."""
    return tuple(_SCHEDULES)


def build(name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None) -> Schedule:
    """Makes a named schedule.

    Args:
        name: One of `names()`.
        num_ranks: How many ranks take part.
        num_microbatches: How many microbatches a step has.
        num_chunks: Stages per rank. None: 2 for the V-shaped schedules, which have no other number; else 1.

    Raises:
        ScheduleError: an unknown name, or sizes that the schedule does not have.
    """
    if name not in _SCHEDULES:
        raise ScheduleError(f"no schedule is called {name!r}: choose from {', '.join(names())}")
    for what, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches), ("num_chunks", num_chunks)):
        if what == "num_chunks" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ScheduleError(f"{what}={value!r}: {name} needs a whole number of at least 1, such as 4")
    known = _SCHEDULES[name]
    if isinstance(known, _Chunked):
        return known.make(num_ranks, num_microbatches, num_chunks or 1)
    if num_chunks not in (None, known.num_chunks):
        raise ScheduleError(
            f"num_chunks={num_chunks}: {name} has {known.num_chunks} per rank; pass {known.num_chunks}, "
            f"or take interleaved-1f1b, which has any number"
        )
    return known.make(num_ranks, num_microbatches)
