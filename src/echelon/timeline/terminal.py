"""Text form of a timeline: a line per rank, time from left to right.

`picture` draws small timelines for docstrings and documents, with room for every label. `lines` scales any timeline to
the width of a terminal.

In colour, the background shows the microbatch and the kind (see `echelon.timeline.palette`). Without colour, a step is
its text or a part of it, with hyphens while it goes on. Idle time is dots, or blank in colour. A column that is longer
than the steps in it shows their kind, or "#" for several kinds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

from echelon.timeline.boxes import Box, boxes_of
from echelon.timeline.palette import color, text_color
from echelon.timeline.timeline import Divided, Kind, Span, Timeline


def picture(timeline: Timeline) -> str:
    """Returns a timeline as text: "0F2" at the start of a step, hyphens while it goes on, blanks while idle.

    A unit of time is as wide as the shortest step needs. Steps that take no time are left out.
    """
    ranks = [[span for span in spans if span.duration > 0] for spans in timeline.spans]
    unit = max((math.ceil((len(_label(span)) + 1) / span.duration) for spans in ranks for span in spans), default=1)
    return "\n".join(f"rank {rank}  {_row(spans, timeline, unit)}" for rank, spans in enumerate(ranks))


def _row(spans: list[Span], timeline: Timeline, unit: int) -> str:
    row = ""
    for span in spans:
        start, end = (round((time - timeline.start) * unit) for time in (span.start, span.end))
        row = row.ljust(start) + _label(span).ljust(end - start - 1, "-")
    return row


def _label(span: Span) -> str:
    return ";".join(part.label for part in span.step.parts()) if isinstance(span.step, Divided) else span.name


IDLE = "."
"""Idle time without colour."""
BOTH_AT_ONCE = "&"
"""Overlapped step without colour."""
HALVES = "▀"
"""Overlapped step in colour: the forward is the upper half, the backward the lower one."""
SEVERAL = "#"
"""Column in which several kinds ran."""


class Piece(NamedTuple):
    """Some columns of a line: text, and the colours of a step as "#rrggbb". Empty colours where there is no step."""

    text: str
    foreground: str = ""
    background: str = ""


Line: TypeAlias = tuple[Piece, ...]
"""The pieces of a rank, its title first."""

# The boxes of a step: two if two actions run at once.
_Step: TypeAlias = tuple[Box, ...]


def lines(timeline: Timeline, width: int, in_color: bool) -> list[Line]:
    """Lays a timeline out in at most `width` columns: one line per rank and one for each of its lanes."""
    boxes = boxes_of(timeline)
    titles = [f"{title}  " for title in boxes.titles]
    margin = max(map(len, titles), default=0)
    rows = [[tuple(group) for _, group in groupby(row, key=_when)] for row in boxes.rows]
    scale = _Scale.that_fits([step for row in rows for step in row], boxes.makespan, max(1, width - margin), in_color)
    draw = _whole_steps if scale.level is not None else _shares
    return [
        (Piece(title.ljust(margin)), *draw(row, boxes.makespan, scale)) for title, row in zip(titles, rows, strict=True)
    ]


def _when(box: Box) -> tuple[float, float, bool]:
    # Two boxes of a row with equal times are one step if they share the height of the row.
    return box.start, box.end, box.upper - box.lower < 1


class _Scale(NamedTuple):
    """Scale of a picture: columns per unit of time, and the length of the labels."""

    columns: float
    level: int | None
    """Index into `_texts`: 0 is the full label. None if most steps are narrower than a column."""
    in_color: bool

    @classmethod
    def that_fits(cls, steps: Sequence[_Step], makespan: float, width: int, in_color: bool) -> _Scale:
        """Chooses the scale for a width in columns."""
        durations = sorted(step[0].width for step in steps if step[0].width > 0)
        if not durations:
            return cls(0.0, 0, in_color)
        # The 10th percentile: in a measured run a few steps are far shorter than the rest.
        short = durations[len(durations) // 10]
        # A whole number of columns for a short step makes equal steps look equal.
        room = math.floor(width * short / makespan + 1e-9)
        if room == 0:
            return cls(width / makespan, None, in_color)
        border = 0 if in_color else 1
        lengths = [max(len(_texts(step)[level]) for step in steps) + border for level in range(2)]
        room = min(room, lengths[0])
        return cls(room / short, next((level for level in range(2) if lengths[level] <= room), 2), in_color)

    def column(self, time: float) -> int:
        return round(time * self.columns)


def _texts(step: _Step) -> tuple[str, str, str]:
    """Returns three labels of a step: in full, without the stage, and as one letter."""
    full = ";".join(box.label for box in step)
    shorter = ";".join(f"{box.kind}{box.short}" if box.is_action else box.short for box in step)
    return full, shorter, BOTH_AT_ONCE if len(step) > 1 else _letter(step[0])


def _letter(box: Box) -> str:
    return box.kind if box.is_action else box.label[:1]


def _whole_steps(row: Sequence[_Step], makespan: float, scale: _Scale) -> Iterator[Piece]:
    column, end = 0, scale.column(makespan)
    for step in row:
        # The first of several steps that share a column gets it.
        first, last = max(column, scale.column(step[0].start)), scale.column(step[0].end)
        if last > first:
            yield _idle(first - column, scale)
            yield _step(step, last - first, scale)
            column = last
    yield _idle(end - column, scale)


def _idle(width: int, scale: _Scale) -> Piece:
    return Piece((" " if scale.in_color else IDLE) * width)


def _step(step: _Step, width: int, scale: _Scale) -> Piece:
    assert scale.level is not None
    text = _texts(step)[scale.level]
    if not scale.in_color:
        border = " " if scale.level < 2 else ""
        return Piece(text[: width - len(border)].ljust(width - len(border), "-") + border)
    if len(step) == 1:
        return Piece(text[:width].ljust(width), text_color(step[0].kind), color(step[0].color_index, step[0].kind))
    upper, lower = step
    return Piece(HALVES * width, color(upper.color_index, upper.kind), color(lower.color_index, lower.kind))


def _shares(row: Sequence[_Step], makespan: float, scale: _Scale) -> Iterator[Piece]:
    """Yields one piece per column: its longest kind, or idle if the rank was idle for more than half of it."""
    shares: list[dict[str, float]] = [{} for _ in range(scale.column(makespan))]
    kinds: dict[str, Kind] = {}
    for box in (box for step in row for box in step):
        kinds[_letter(box)] = box.kind
        for column, share in _columns(box, scale.columns, len(shares)):
            share_of = shares[column]
            share_of[_letter(box)] = share_of.get(_letter(box), 0.0) + share * (box.upper - box.lower)
    for share_of in shares:
        if sum(share_of.values()) < 0.5:
            yield _idle(1, scale)
            continue
        letter = max(share_of, key=lambda letter: share_of[letter])
        text = letter if len(share_of) == 1 else SEVERAL
        yield Piece(text, text_color(kinds[letter]), color(None, kinds[letter])) if scale.in_color else Piece(text)


def _columns(box: Box, columns: float, count: int) -> Iterator[tuple[int, float]]:
    """Yields the columns that a box touches, each with the share of it that the box covers."""
    start, end = box.start * columns, box.end * columns
    for column in range(int(start), min(count, math.ceil(end))):
        yield column, min(end, column + 1) - max(start, column)
