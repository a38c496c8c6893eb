"""What was aimed at, and whether what was measured reaches it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

KIB, MIB = 1 << 10, 1 << 20
OTHERS = ("reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all", "barrier")


class Found(NamedTuple):
    """What each contestant took for one case, in seconds."""

    num_ranks: int
    operation: str
    size: int
    seconds: dict[str, float]


class Goal(NamedTuple):
    """At least `least` times as fast as `peer`, or, if that is None, at most so many microseconds; for some cases."""

    contestant: str
    peer: str | None
    least: float
    num_ranks: tuple[int, ...]
    operations: tuple[str, ...]
    sizes: Callable[[int], bool]
    which: str

    def value(self, found: Found) -> float | None:
        """Returns what this goal is about, None where the case is none of its cases."""
        wanted = found.num_ranks in self.num_ranks and found.operation in self.operations and self.sizes(found.size)
        if not wanted or self.contestant not in found.seconds or (self.peer or self.contestant) not in found.seconds:
            return None
        if self.peer is None:
            return found.seconds[self.contestant] * 1e6
        return found.seconds[self.peer] / found.seconds[self.contestant]

    def is_met_by(self, value: float) -> bool:
        """Says whether the value of a case is good enough."""
        return value <= self.least if self.peer is None else value >= self.least

    def line(self, rows: Iterable[Found]) -> str | None:
        """Returns a line of the table of goals, None where nothing was measured for this one."""
        values = [(value, row) for row in rows if (value := self.value(row)) is not None]
        if not values:
            return None
        worst, where = (max if self.peer is None else min)(values, key=lambda pair: pair[0])
        missed = sum(not self.is_met_by(value) for value, _ in values)
        verdict = "met" if not missed else f"**missed** in {missed} of {len(values)}"
        against = f"{self.least:g} us" if self.peer is None else f"{self.least:g} times {self.peer}"
        unit = " us" if self.peer is None else ""
        what = f"{'/'.join(map(str, self.num_ranks))} ranks, {self.which}, {self.contestant}"
        at = f"{where.operation}, {where.num_ranks} ranks, {where.size} B"
        return f"| {what} | {against} | {worst:.3g}{unit} ({at}) | {verdict} |"


def _all(_: int) -> bool:
    return True


_REDUCE = ("all_reduce",)
_SEND = ("send_recv",)
GOALS: Sequence[Goal] = (
    Goal("any tensor", "Gloo", 5, (2,), _REDUCE, _all, "all_reduce of every size"),
    Goal("any tensor", "Gloo", 3, (4,), _REDUCE, _all, "all_reduce of every size"),
    Goal("symmetric", "Gloo", 8, (2, 4), _REDUCE, lambda size: size == 64 * MIB, "all_reduce of 64 MiB"),
    Goal("symmetric", "Gloo", 15, (2, 4), _REDUCE, lambda size: size == MIB, "all_reduce of 1 MiB"),
    Goal("any tensor", "Open MPI", 1, (2, 4), _REDUCE, lambda size: size >= 16 * KIB, "all_reduce from 16 KiB"),
    Goal("symmetric", "Open MPI", 1, (2, 4), _REDUCE, lambda size: size >= 256 * KIB, "all_reduce from 256 KiB"),
    Goal("symmetric", "Open MPI", 4, (2, 4), _REDUCE, lambda size: size == 64 * MIB, "all_reduce of 64 MiB"),
    Goal("any tensor", None, 12, (2,), _REDUCE, lambda size: size == 8, "all_reduce of 8 B"),
    Goal("any tensor", None, 60, (4,), _REDUCE, lambda size: size == 8, "all_reduce of 8 B"),
    Goal("any tensor", None, 5, (2,), _SEND, lambda size: size == 8, "send_recv of 8 B, one way"),
    Goal("any tensor", "Open MPI", 1.5, (2,), _SEND, lambda size: size == 16 * MIB, "send_recv of 16 MiB"),
    Goal("symmetric", "limit", 0.75, (2, 4), _REDUCE, lambda size: size >= 16 * MIB, "all_reduce from 16 MiB"),
    Goal("any tensor", "Gloo", 3, (2, 4), OTHERS, _all, "all other collectives"),
)


def lines(rows: Sequence[Found]) -> list[str]:
    """Returns the table of all goals that something was measured for."""
    found = [line for goal in GOALS if (line := goal.line(rows)) is not None]
    return ["| goal | at least, as fast as | least favourable | |", "|---|---|---|---|", *found] if found else []
