"""Text form of a timeline: a line per rank, time from left to right.

`picture` draws small timelines for docstrings and documents, with room for every label. `lines` scales any timeline to
the width of a terminal.

In colour the background is the kind of a step, and the text its microbatch; steps of a later chunk are underlined.
Without colour a step is its letter and microbatch, in lower case on every second chunk, with hyphens while it goes on.
Warm-up and drain are blank, and waits are marked by their cause.

Memory in bytes is a strip of blocks below its rank, with the rank's peak in front. The largest peak is a full block.

Where steps are narrower than a column, the letters of a line keep the shares of the kinds: with twice as much time in
B as in F, two of three letters are B. In colour a column shows two such samples, as halves of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

from echelon.timeline.boxes import Box, Row, TimelineLayout, boxes_of
from echelon.timeline.palette import CAUSE_NAMES, COLORS, NAMES, text_color
from echelon.timeline.timeline import Cause, Divided, MemoryUnit, Span, Timeline
from echelon.timeline.words import figures, memory_text, title


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


IDLE: Mapping[Cause, str] = {"warm_up": " ", "other_ranks": ".", "transfer": "~", "overhead": "?", "drain": " "}
"""Idle time by its cause, without colour."""
IDLE_IN_COLOR: Mapping[Cause, str] = {**IDLE, "other_ranks": "·"}
"""Idle time by its cause, in colour."""
BOTH_AT_ONCE = "&"
"""Overlapped step without colour."""
HALVES = "▀"
"""Overlapped step in colour: the forward is the upper half, the backward the lower one."""
MEMORY = " ▁▂▃▄▅▆▇█"
"""Blocks for memory, from none to the largest peak."""
_ACTIONS = ("F", "I", "B", "W")
_TWO_SAMPLES = "▌"
_BORDER = "▏"

_WIDTH = 100
_MOST_ROWS = 64


class Piece(NamedTuple):
    """Some columns of a line: text, and the colours of a step as "#rrggbb". Empty colours where there is no step."""

    text: str
    foreground: str = ""
    background: str = ""
    is_underlined: bool = False
    """Whether a step is of a later chunk."""


Line: TypeAlias = tuple[Piece, ...]
"""The pieces of a rank, its title first."""

# The boxes of a step: two if two actions run at once.
_Step: TypeAlias = tuple[Box, ...]


def as_text(timeline: Timeline) -> str:
    """Returns a timeline as plain text: title, figures, a line per rank, and a legend."""
    layout = boxes_of(timeline)
    drawn = lines(layout, _WIDTH, in_color=False, memory_unit=timeline.memory_unit)
    rows = ["".join(piece.text for piece in line).rstrip() for line in drawn[:_MOST_ROWS]]
    if len(drawn) > _MOST_ROWS:
        rows.append(f"and {len(drawn) - _MOST_ROWS} more rows: draw(FILE) draws them")
    return "\n".join([title(timeline), figures(timeline), "", *rows, "", *legend(layout, drawn, _WIDTH)]).rstrip()


def legend(layout: TimelineLayout, drawn: Sequence[Line], width: int) -> list[str]:
    """Returns the lines of a legend without colour: only of signs that occur in the picture."""
    found: list[str] = []
    for entry in _entries(layout, drawn):
        if found and len(found[-1]) + 3 + len(entry) <= width:
            found[-1] += f"   {entry}"
        else:
            found.append(entry)
    return found


def _entries(layout: TimelineLayout, drawn: Sequence[Line]) -> list[str]:
    # line[0] is the title, whose letters are no signs.
    shown = {character for line in drawn for piece in line[1:] for character in piece.text}
    kinds = [tone for tone in layout.tones if tone in _ACTIONS]
    entries = [f"{kind} {NAMES[kind]}" for kind in kinds]
    if layout.num_chunks > 1 and any(letter.lower() in shown for letter in kinds):
        entries.append(f"lower case: {'every second' if layout.num_chunks > 2 else 'second'} chunk")
    if BOTH_AT_ONCE in shown:
        entries.append(f"{BOTH_AT_ONCE} both at once")
    if MEMORY[-1] in shown:
        entries.append(f"{MEMORY[-1]} most memory that a rank holds")
    return entries + [f"{sign} {CAUSE_NAMES[cause]}" for cause, sign in IDLE.items() if sign.strip() and sign in shown]


def lines(layout: TimelineLayout, width: int, in_color: bool, memory_unit: MemoryUnit = "") -> list[Line]:
    """Draws a timeline in at most `width` columns: a line per rank, one for its memory in bytes, one for each lane."""
    titles = [f"{row.title}  " for row in layout.rows]
    # Strips double the number of rows.
    has_strips = memory_unit == "B" and len(layout.rows) <= _MOST_ROWS // 2
    peaks = [_peak(row) if has_strips else "" for row in layout.rows]
    margin = max(map(len, (*titles, *peaks)), default=0)
    steps = [[tuple(group) for _, group in groupby(row.boxes, key=_when)] for row in layout.rows]
    every = [step for row in steps for step in row]
    scale = _Scale.that_fits(every, layout.makespan, max(1, width - margin), in_color)
    draw = _whole_steps if scale.level is not None else _samples
    found: list[Line] = []
    for name, peak, row, its_steps in zip(titles, peaks, layout.rows, steps, strict=True):
        found.append((Piece(name.ljust(margin)), *draw(row, its_steps, scale)))
        if peak:
            found.append((Piece(peak.ljust(margin)), Piece(_strip(row, layout.most_memory, scale))))
    return found


def _peak(row: Row) -> str:
    most = max((level.amount for level in row.memory), default=0)
    return f"{memory_text(most, 'B')}  " if most else ""


def _strip(row: Row, most: float, scale: _Scale) -> str:
    """Returns a block for each column, as high as the most memory that the rank holds in it."""
    count = scale.column(scale.makespan)
    held = [0.0] * count
    ends = [*(level.time for level in row.memory[1:]), scale.makespan]
    for level, end in zip(row.memory, ends, strict=True):
        # 1e-9: by the rounding of floats a level that ends with a column would reach into the next one.
        for column in range(int(level.time * scale.columns), min(count, math.ceil(end * scale.columns - 1e-9))):
            held[column] = max(held[column], float(level.amount))
    return "".join(MEMORY[math.ceil((len(MEMORY) - 1) * amount / most)] for amount in held)


def _when(box: Box) -> tuple[float, float, bool]:
    # Two boxes of a row with equal times are one step if they share the height of the row.
    return box.start, box.end, box.upper - box.lower < 1


class _Scale(NamedTuple):
    """Scale of a picture: columns per unit of time, and the length of the labels."""

    columns: float
    level: int | None
    """Index into `_texts`: 0 is the full label. None if most steps are narrower than a column."""
    in_color: bool
    makespan: float

    @classmethod
    def that_fits(cls, steps: Sequence[_Step], makespan: float, width: int, in_color: bool) -> _Scale:
        """Chooses the scale for a width in columns."""
        durations = sorted(step[0].width for step in steps if step[0].width > 0)
        if not durations:
            return cls(0.0, 0, in_color, makespan)
        # The 10th percentile: in a measured run a few steps are far shorter than the rest.
        short = durations[len(durations) // 10]
        # A whole number of columns for a short step makes equal steps look equal.
        # 1e-9: the rounding of floats must not take a column from a step that fits exactly.
        room = math.floor(width * short / makespan + 1e-9)
        if room == 0:
            return cls(width / makespan, None, in_color, makespan)
        lengths = [max(len(_texts(step, in_color)[level]) for step in steps) + 1 for level in range(2)]
        room = min(room, lengths[0])
        return cls(room / short, next((level for level in range(2) if lengths[level] <= room), 2), in_color, makespan)

    def column(self, time: float) -> int:
        return round(time * self.columns)


def _texts(step: _Step, in_color: bool) -> tuple[str, str, str]:
    """Returns three labels of a step: in full, shorter, and as one character or less."""
    if in_color:
        # The colour is the kind already.
        full = ";".join(box.short if box.is_action else box.label for box in step)
        return full, ";".join(box.short for box in step), ""
    full = ";".join(f"{box.letter}{box.short}" if box.is_action else box.label for box in step)
    shorter = ";".join(f"{box.letter}{box.short}" if box.is_action else box.short for box in step)
    return full, shorter, BOTH_AT_ONCE if len(step) > 1 else step[0].letter


def _whole_steps(row: Row, steps: Sequence[_Step], scale: _Scale) -> Iterator[Piece]:
    column, end = 0, scale.column(scale.makespan)
    for step in steps:
        # The first of several steps that share a column gets it.
        first, last = max(column, scale.column(step[0].start)), scale.column(step[0].end)
        if last > first:
            yield from _idle(row, column, first, scale)
            yield _step(step, last - first, scale)
            column = last
    yield from _idle(row, column, end, scale)


def _idle(row: Row, first: int, last: int, scale: _Scale) -> Iterator[Piece]:
    """Yields idle columns, each with the sign of the cause at its middle. A lane has none."""
    signs = IDLE_IN_COLOR if scale.in_color else IDLE
    gaps = [gap for gap in row.gaps if gap.end * scale.columns > first and gap.start * scale.columns < last]
    text = ""
    for column in range(first, last):
        time = (column + 0.5) / scale.columns
        # Rounding may move a column to just beside its gap.
        near = min(gaps, key=lambda gap: max(float(gap.start) - time, time - float(gap.end)), default=None)
        text += " " if near is None else signs[near.cause]
    yield Piece(text)


def _step(step: _Step, width: int, scale: _Scale) -> Piece:
    assert scale.level is not None
    text = _texts(step, scale.in_color)[scale.level]
    if not scale.in_color:
        border = " " if scale.level < 2 else ""
        return Piece(text[: width - len(border)].ljust(width - len(border), "-") + border)
    if len(step) == 1:
        fill = COLORS[step[0].tone]
        # Neighbours of one kind would run into each other without a border.
        shown = (_BORDER + text)[:width].ljust(width) if width > len(text) else text[:width]
        return Piece(shown, text_color(fill), fill, step[0].chunk > 0)
    upper, lower = step
    return Piece(HALVES * width, COLORS[upper.tone], COLORS[lower.tone])


def _samples(row: Row, steps: Sequence[_Step], scale: _Scale) -> Iterator[Piece]:
    """Yields one piece per column where steps are narrower than columns."""
    boxes = [box for step in steps for box in step]
    if scale.in_color:
        halves = list(_sampled(row, boxes, 2 * scale.columns, 2 * scale.column(scale.makespan)))
        for left, right in zip(halves[::2], halves[1::2], strict=True):
            yield _two(left, right)
        return
    for sample in _sampled(row, boxes, scale.columns, scale.column(scale.makespan)):
        yield Piece(sample if isinstance(sample, str) else sample.letter)


def _two(left: Box | str, right: Box | str) -> Piece:
    if isinstance(left, str) and isinstance(right, str):
        return Piece(IDLE_IN_COLOR["other_ranks"] if left == "." else left)
    if isinstance(left, str):
        assert isinstance(right, Box)
        return Piece("▐", COLORS[right.tone])
    return Piece(_TWO_SAMPLES, COLORS[left.tone], "" if isinstance(right, str) else COLORS[right.tone])


def _sampled(row: Row, boxes: Sequence[Box], columns: float, count: int) -> Iterator[Box | str]:
    """Yields a box for each column, or the sign of its idle time, so that each kind keeps its share of the columns."""
    shares: list[dict[str, float]] = [{} for _ in range(count)]
    samples: dict[str, Box | str] = {}

    def add(key: str, sample: Box | str, start: float, end: float, height: float) -> None:
        samples.setdefault(key, sample)
        for column in range(int(start * columns), min(count, math.ceil(end * columns))):
            share = min(end * columns, column + 1) - max(start * columns, column)
            shares[column][key] = shares[column].get(key, 0.0) + share * height

    for box in boxes:
        add(f"{box.tone}{box.letter}", box, box.start, box.end, box.upper - box.lower)
    for start, end, cause in row.gaps:
        add(f"idle {cause}", IDLE[cause], float(start), float(end), 1.0)
    # A kind that was not shown in a column is owed its share of it in the next ones, where it occurs again.
    owed: dict[str, float] = {}
    for found in shares:
        for key, share in found.items():
            owed[key] = owed.get(key, 0.0) + share
        if not found:
            yield " "
            continue
        best = max(found, key=lambda key: owed[key])
        owed[best] -= 1.0
        yield samples[best]
