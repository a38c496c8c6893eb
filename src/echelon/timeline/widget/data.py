"""Data of the timeline for browsers: rows of boxes as whole numbers, which take few bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from echelon.timeline.boxes import Box, Row, boxes_of, critical_lines
from echelon.timeline.palette import CAUSE_NAMES, COLORS, LINES, NAMES, Tone
from echelon.timeline.timeline import Cause, Timeline
from echelon.timeline.words import axis_words, chunk_words, figures, memory_text, memory_words, time_scale, title

# At the closest zoom of the script, 1e-5, a hundred of them are across the screen.
_UNIT = 10_000_000
"""Whole numbers in the length of a panel."""
_TONES: tuple[Tone, ...] = tuple(NAMES)
_CAUSES: tuple[Cause, ...] = tuple(CAUSE_NAMES)


class Words(NamedTuple):
    """Text of a box: in full, in the box, and longer while it is pointed at."""

    full: str
    short: str
    more: str = ""


class Piece(NamedTuple):
    """Box of a row. Times are shares of the panel's length."""

    start: float
    end: float
    tone: Tone
    words: Words
    chunk: int = 0
    half: int = 0
    """0: the whole height, 1: the upper half, 2: the lower half."""


class Part(NamedTuple):
    """Text for a part of a row. Times are shares of the panel's length."""

    start: float
    end: float
    text: str


class Lane(NamedTuple):
    """Row of a panel."""

    title: str
    pieces: Sequence[Piece]
    is_lane: bool = False
    head: str = ""
    """Text in a line of its own above the row."""
    parts: Sequence[Part] | None = None
    """Texts instead of those of the pieces, where neighbours were joined."""
    gaps: Sequence[tuple[float, float, Cause]] = ()
    memory: Sequence[tuple[float, float]] = ()
    peak: str = ""
    owner: str = ""
    """Title in descriptions, if it is another one."""


class Panel(NamedTuple):
    """Timeline of a page."""

    title: str
    figures: str
    lanes: Sequence[Lane]
    length: float
    """Time that its axis shows."""
    makespan: float
    scale: tuple[str, float]
    axis: str
    critical: Sequence[tuple[float, int, float, int]] = ()
    memory_unit: str = ""
    memory_words: str = ""
    chunk_words: str = ""


def panel_of(timeline: Timeline, length: float) -> Panel:
    """Returns the panel of a timeline."""
    layout = boxes_of(timeline)
    scale = time_scale(length, timeline.unit)
    return Panel(
        title=title(timeline),
        figures=figures(timeline),
        lanes=[_lane(timeline, row, length) for row in layout.rows],
        length=length,
        makespan=layout.makespan / length,
        scale=scale,
        axis=axis_words(timeline, scale),
        critical=[(start / length, rank, end / length, other) for start, rank, end, other in critical_lines(timeline)],
        memory_unit=timeline.memory_unit,
        memory_words=memory_words(timeline) if layout.most_memory else "",
        chunk_words=chunk_words(layout.num_chunks) if layout.num_chunks > 1 else "",
    )


def _lane(timeline: Timeline, row: Row, length: float) -> Lane:
    peak = max((float(level.amount) for level in row.memory), default=0.0)
    return Lane(
        title=row.title,
        pieces=[_piece(box, length) for box in row.boxes],
        is_lane=row.is_lane,
        gaps=[(float(gap.start) / length, float(gap.end) / length, gap.cause) for gap in row.gaps],
        memory=[(float(time) / length, float(held)) for time, held in row.memory] if peak else (),
        peak=memory_text(peak, timeline.memory_unit) if peak else "",
        owner=timeline.title_of(row.rank) if row.is_lane else "",
    )


def _piece(box: Box, length: float) -> Piece:
    more = f"{NAMES[box.tone]} of microbatch {box.short}" if box.is_action else ""
    more += f", chunk {box.chunk}" if box.chunk else ""
    half = 0 if box.upper - box.lower == 1 else 1 if box.lower else 2
    return Piece(box.start / length, box.end / length, box.tone, Words(box.label, box.short, more), box.chunk, half)


@dataclass
class Data:
    """Panels as JSON. Equal texts are written once.

    Args:
        panels: The panels, from top to bottom.
    """

    panels: Sequence[Panel]
    _labels: dict[Words, int] = field(default_factory=dict)
    _texts: dict[str, int] = field(default_factory=dict)

    @property
    def tones(self) -> list[Tone]:
        """Kinds that occur, in the order of a legend."""
        found = {piece.tone for panel in self.panels for lane in panel.lanes for piece in lane.pieces}
        return [tone for tone in _TONES if tone in found]

    @property
    def causes(self) -> list[Cause]:
        """Causes of idle time that occur."""
        found = {gap[2] for panel in self.panels for lane in panel.lanes for gap in lane.gaps}
        return [cause for cause in _CAUSES if cause in found]

    def to_json(self) -> str:
        """Returns the data as JSON that may stand in an element of HTML."""
        panels = [self._panel(panel) for panel in self.panels]
        values = {
            "unit": _UNIT,
            "tones": [(NAMES[tone], COLORS[tone]) for tone in _TONES],
            "causes": _CAUSES,
            "causeNames": list(CAUSE_NAMES.values()),
            "hatches": [[round(96 * distance) for distance in LINES[cause]] for cause in _CAUSES],
            "labels": list(self._labels),
            "texts": list(self._texts),
            "panels": panels,
        }
        text = json.dumps(values, separators=(",", ":"))
        # No text of a program may end the element.
        return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

    def _panel(self, panel: Panel) -> dict[str, object]:
        most = max((held for lane in panel.lanes for _, held in lane.memory), default=0.0)
        return {
            "length": panel.length,
            "makespan": panel.makespan,
            "scale": panel.scale,
            "axis": panel.axis,
            "memoryUnit": panel.memory_unit,
            "most": most,
            "critical": [(_whole(start), rank, _whole(end), other) for start, rank, end, other in panel.critical],
            "rows": [self._row(lane) for lane in panel.lanes],
        }

    def _row(self, lane: Lane) -> dict[str, object]:
        # Most rows have neither chunks nor halves, and a foreseen step has many thousands of boxes.
        size = 4 if any(piece.chunk or piece.half for piece in lane.pieces) else 2
        row: dict[str, object] = {
            "title": lane.title,
            "size": 2 + size,
            "boxes": _packed(
                (
                    piece.start,
                    piece.end,
                    *(_TONES.index(piece.tone), self._label(piece.words), piece.chunk, piece.half)[:size],
                )
                for piece in lane.pieces
            ),
        }
        if lane.gaps:
            row["gaps"] = _packed((start, end, _CAUSES.index(cause)) for start, end, cause in lane.gaps)
        if lane.parts is not None:
            row["parts"] = _packed(
                (part.start, part.end, self._texts.setdefault(part.text, len(self._texts))) for part in lane.parts
            )
        if lane.memory:
            row["memory"] = [number for time, held in lane.memory for number in (_whole(time), _short(held))]
        named = {"lane": lane.is_lane, "head": lane.head, "peak": lane.peak, "owner": lane.owner}
        return row | {name: value for name, value in named.items() if value}

    def _label(self, words: Words) -> int:
        return self._labels.setdefault(words, len(self._labels))


def _whole(share: float) -> int:
    return round(share * _UNIT)


def _short(value: float) -> float:
    return int(value) if value == int(value) else float(f"{value:.6g}")


def _packed(items: Iterable[tuple[float, float, *tuple[int, ...]]]) -> list[int]:
    """Returns items as numbers in a row: distance from the end of the one before, duration, and the rest."""
    numbers: list[int] = []
    last = 0
    for start, end, *rest in items:
        first, final = _whole(start), _whole(end)
        numbers += (first - last, final - first, *rest)
        last = final
    return numbers
