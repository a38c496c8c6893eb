"""Layout of a picture, shared by the figure, the page and the terminal: rows of boxes, lines, order and scales."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby, pairwise
from typing import NamedTuple, cast

from echelon.timeline.palette import NAMES, Tone, tone_of
from echelon.timeline.timeline import Divided, Gap, Level, Span, Timeline
from echelon.timeline.words import is_measured

# Steps such as "all_reduce #1" and "all_reduce #2" share a short text, which ends before the first number or bracket.
_NAME = re.compile(r"[^\d(\[,]*")
_COMMUNICATION: frozenset[Tone] = frozenset(
    {"send", "receive", "all_gather", "reduce_scatter", "communication", "exposed"}
)


# Lower and upper edges of the parts of a step, the upper part first.
_WHOLE, _HALVES = ((0.0, 1.0),), ((0.5, 1.0), (0.0, 0.5))


class Box(NamedTuple):
    """Rectangle in a row. Times count from the start of the timeline."""

    start: float
    end: float
    label: str
    """Full text, such as "0F3"."""
    short: str
    """Text in the box: the microbatch of an action, the name of another step."""
    tone: Tone
    chunk: int = 0
    """Index of an action's stage among the stages of its rank."""
    lower: float = 0.0
    """Lower edge as a share of the row's height, 0 to 1. An overlapped step is two boxes, one above the other."""
    upper: float = 1.0
    is_action: bool = False
    """Whether the step is an action of a pipeline."""

    @property
    def width(self) -> float:
        """Duration of the step."""
        return self.end - self.start

    @property
    def letter(self) -> str:
        """One character for the step: its kind in upper case, in lower case for an odd chunk."""
        letter = self.tone if self.is_action else self.label[:1]
        return letter.lower() if self.is_action and self.chunk % 2 else letter


@dataclass(frozen=True)
class Row:
    """Row of a picture: the steps of a rank, or one of its lanes.

    Args:
        title: Text in front of the row.
        boxes: Boxes in order of time.
        rank: Index of the rank.
        gaps: Idle time of the rank, from the start of the timeline. Empty for a lane.
        memory: Memory that the rank holds, from the start of the timeline. Empty for a lane, and if it is not known.
        is_lane: Whether the row shows spans that ran beside the steps of its rank.
    """

    title: str
    boxes: tuple[Box, ...]
    rank: int
    gaps: tuple[Gap, ...] = ()
    memory: tuple[Level, ...] = ()
    is_lane: bool = False


@dataclass(frozen=True)
class TimelineLayout:
    """All rows of a timeline.

    Args:
        rows: A row for a rank's steps, then a row for each of its lanes.
        makespan: End of the last box.
        num_chunks: Most stages of a rank. 0 without actions.
        most_memory: Most memory that a rank holds.
    """

    rows: tuple[Row, ...]
    makespan: float
    num_chunks: int
    most_memory: float

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """All boxes."""
        return tuple(box for row in self.rows for box in row.boxes)

    @cached_property
    def tones(self) -> tuple[Tone, ...]:
        """Kinds that occur, in the order of a legend."""
        found = {box.tone for box in self.boxes}
        return tuple(tone for tone in NAMES if tone in found)


def boxes_of(timeline: Timeline, most_ranks: int | None = None) -> TimelineLayout:
    """Lays out a timeline, or its first ranks alone. Boxes of thousands of ranks take minutes."""
    rows: list[Row] = []
    most_chunks = 0
    memory = timeline.memory if len(timeline.memory) == timeline.num_ranks else [()] * timeline.num_ranks
    for rank, spans in enumerate(timeline.spans[:most_ranks]):
        chunks = _chunks(spans)
        most_chunks = max(most_chunks, len(chunks))
        rows.append(
            Row(
                timeline.title_of(rank),
                tuple(_boxes(timeline, spans, chunks)),
                rank,
                tuple(_from_start(timeline, timeline.gaps[rank])),
                tuple(Level(float(time - timeline.start), float(held)) for time, held in memory[rank]),
            )
        )
        for lane in timeline.beside[rank] if timeline.beside else ():
            boxes = tuple(_boxes(timeline, lane, {}))
            talks = {box.tone for box in boxes} <= _COMMUNICATION
            rows.append(Row("communication" if talks else "beside", boxes, rank, is_lane=True))
    return TimelineLayout(
        rows=tuple(rows),
        makespan=float(timeline.makespan),
        num_chunks=most_chunks,
        most_memory=max((level.amount for row in rows for level in row.memory), default=0.0),  # type: ignore[arg-type]
    )


def _from_start(timeline: Timeline, gaps: Iterable[Gap]) -> Iterator[Gap]:
    for start, end, cause in gaps:
        yield Gap(float(start - timeline.start), float(end - timeline.start), cause)


def _chunks(spans: Sequence[Span]) -> Mapping[int, int]:
    """Returns the index of each stage among the stages of the rank."""
    divided = _divided(spans)
    stages = {
        stage
        for span in spans
        if type(span.step) in divided
        for part in cast(Divided, span.step).parts()
        if (stage := part.details.get("stage")) is not None
    }
    return {stage: index for index, stage in enumerate(sorted(stages))}


def _boxes(timeline: Timeline, spans: Sequence[Span], chunks: Mapping[int, int]) -> Iterator[Box]:
    divided = _divided(spans)
    for step, start, end in spans:
        box = partial(Box, float(start - timeline.start), float(end - timeline.start))
        if type(step) in divided:
            parts = cast(Divided, step).parts()
            edges = _HALVES if len(parts) > 1 else _WHOLE
            for part, (lower, upper) in zip(parts, edges, strict=True):
                chunk = chunks.get(part.details.get("stage", -1), 0)
                yield box(part.label, str(part.number), part.kind, chunk, lower, upper, True)
            continue
        label = str(step)
        match = _NAME.match(label)
        assert match is not None, "the pattern matches the empty text as well"
        # A label that begins with a number has no name before it, and then names itself.
        yield box(label, match[0].strip() or label, tone_of(label))


def _divided(spans: Iterable[Span]) -> frozenset[type]:
    """Returns the types of the steps that list their parts."""
    # A protocol is slow to check, and a long run has a million steps of two types.
    steps = {type(span.step): span.step for span in spans}
    return frozenset(kind for kind, step in steps.items() if isinstance(step, Divided))


def critical_lines(timeline: Timeline) -> list[tuple[float, int, float, int]]:
    """Returns the critical path as lines (start, rank, end, rank): along its spans, and from rank to rank.

    Empty if the timeline has no transfers: then the path is that of one rank, and shows nothing.
    """
    if not timeline.transfers:
        return []
    lines: list[tuple[float, int, float, int]] = []
    path = [
        (item.rank, float(item.span.start - timeline.start), float(item.span.end - timeline.start))
        for item in timeline.critical_path
    ]
    for (rank, _, end), (other, start, _) in pairwise(path):
        if rank != other:
            lines.append((end, rank, start, other))
    # Spans of one rank in a row are one line.
    for rank, spans in groupby(path, key=lambda place: place[0]):
        places = list(spans)
        lines.append((places[0][1], rank, places[-1][2], rank))
    return lines


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
