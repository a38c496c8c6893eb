"""Registry of schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from echelon.arguments import choices, is_count, refuse_others
from echelon.errors import ScheduleError
from echelon.pipeline.plan.action import loop
from echelon.pipeline.plan.schedule import Schedule, check_forwards
from echelon.pipeline.schedules.dualpipe_v import dualpipe_v
from echelon.pipeline.schedules.forward_only import forward_only
from echelon.pipeline.schedules.gpipe import gpipe, looped_bfs
from echelon.pipeline.schedules.one_f_one_b import interleaved_1f1b, one_f_one_b
from echelon.pipeline.schedules.v_shaped import v_half, v_min
from echelon.pipeline.schedules.zero_bubble import zb_h1, zb_h2, zb_v


class _Fixed(NamedTuple):
    """Schedule with a fixed number of chunks, made from num_ranks and num_microbatches."""

    make: Callable[[int, int], Schedule]
    num_chunks: int = 1


class _Chunked(NamedTuple):
    """Schedule with any number of chunks, made from num_ranks, num_microbatches and num_chunks."""

    make: Callable[[int, int, int], Schedule]
    default: int = 1


class _Grouped(NamedTuple):
    """Schedule with any number of chunks that takes a group size (or None) as well."""

    make: Callable[[int, int, int, int | None], Schedule]
    default: int = 1


_Known: TypeAlias = _Fixed | _Chunked | _Grouped

# With one chunk interleaved-1f1b is 1f1b and looped-bfs is gpipe: nobody who names them asks for those.
_SCHEDULES: dict[str, _Known] = {
    "gpipe": _Fixed(gpipe),
    "1f1b": _Fixed(one_f_one_b),
    "interleaved-1f1b": _Grouped(interleaved_1f1b, default=2),
    "looped-bfs": _Chunked(looped_bfs, default=2),
    "zb-h1": _Fixed(zb_h1),
    "zb-h2": _Fixed(zb_h2),
    "zb-v": _Fixed(zb_v, num_chunks=2),
    "v-half": _Fixed(v_half, num_chunks=2),
    "v-min": _Fixed(v_min, num_chunks=2),
    "dualpipe-v": _Fixed(dualpipe_v, num_chunks=2),
    "forward-only": _Chunked(lambda ranks, microbatches, chunks: forward_only(loop(ranks, chunks), microbatches)),
}


def names() -> tuple[str, ...]:
    """Returns the names of all schedules that `build` can make."""
    return tuple(_SCHEDULES)


def fixed_chunks(name: str) -> int | None:
    """Returns the stages per rank of a schedule that has one number of them. None for others, and for unknown names."""
    known = _SCHEDULES.get(name)
    return known.num_chunks if isinstance(known, _Fixed) else None


@refuse_others(
    num_stages=" give num_ranks and num_chunks, whose product is the number of stages",
    chunks=" num_microbatches is the number of parts of a batch, num_chunks that of stages per rank",
)
def build(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None, group_size: int | None = None
) -> Schedule:
    """Returns a named schedule.

    Args:
        name: One of `names()`.
        num_ranks: Number of ranks.
        num_microbatches: Number of microbatches of a step.
        num_chunks: Stages per rank. None: 2 for interleaved-1f1b and looped-bfs, and for the V-shaped schedules, which
            have no other number; else 1.
        group_size: For interleaved-1f1b: number of microbatches that a chunk runs before the next chunk's turn. None:
            num_ranks.

    Raises:
        ScheduleError: an unknown name, or sizes that the schedule does not support.
    """
    if not isinstance(name, str) or name not in _SCHEDULES:
        raise ScheduleError(f"no schedule is called {name!r}: {choices(name, names(), 'choose from')}")
    _require_positive(name, "num_ranks", num_ranks)
    _require_positive(name, "num_microbatches", num_microbatches)
    _require_positive(name, "num_chunks", 1 if num_chunks is None else num_chunks)
    known = _SCHEDULES[name]
    chunks = num_chunks or (known[1] if isinstance(known, _Grouped | _Chunked | _Fixed) else 1)
    check_forwards(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=chunks)
    # An argument that a schedule has no use for is refused: ignoring it would give another schedule than asked for.
    if group_size is not None:
        _require_positive(name, "group_size", group_size)
        if not isinstance(known, _Grouped):
            raise ScheduleError(
                f"group_size={group_size}: {name} has no groups; leave it out, or take interleaved-1f1b"
            )
    match known:
        case _Grouped(make, default):
            return make(num_ranks, num_microbatches, num_chunks or default, group_size)
        case _Chunked(make, default):
            return make(num_ranks, num_microbatches, num_chunks or default)
        case _Fixed(make, fixed):
            if num_chunks not in (None, fixed):
                raise ScheduleError(
                    f"num_chunks={num_chunks}: {name} has {fixed} per rank; pass {fixed}, or take interleaved-1f1b"
                )
            return make(num_ranks, num_microbatches)


def _require_positive(name: str, what: str, value: object) -> None:
    if not is_count(value, least=1):
        raise ScheduleError(f"{what}={value!r}: {name} needs a whole number of at least 1, such as 4")
