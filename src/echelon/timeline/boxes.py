"""Layout of a timeline as boxes in rows, shared by the figure and the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from echelon.timeline.timeline import Divided, Kind, Part, Span, Timeline

# Steps such as "all_reduce #1" and "all_reduce #2" share a colour, so a name ends before its first number or bracket.
_NAME = re.compile(r"[^\d(\[,]*")


class Box(NamedTuple):
    """Rectangle in a row. Times count from the start of the timeline."""

    start: float
    end: float
    label: str
    short: str
    """Text used if `label` does not fit: the microbatch of an action, the name of another step."""
    color_index: int
    """Microbatch of an action. For other steps, the index of the name in `TimelineLayout.names`."""
    kind: Kind
    """Forward, for a step that is no action."""
    is_action: bool = True
    lower: float = 0.0
    """Lower edge as a share of the row's height, 0 to 1. An overlapped step is two boxes, one above the other."""
    upper: float = 1.0

    @property
    def width(self) -> float:
        """Duration of the step."""
        return self.end - self.start


@dataclass(frozen=True)
class TimelineLayout:
    """All boxes of a timeline.

    Args:
        titles: Title of each row.
        rows: Boxes of each row: a row for a rank's steps, then a row for each of its lanes.
        makespan: End of the last box.
        kinds: Kinds of actions that occur.
        num_microbatches: One more than the highest microbatch of an action; 0 without actions.
        names: Names of the steps that are no actions, up to the first number, bracket or comma.
    """

    titles: tuple[str, ...]
    rows: tuple[tuple[Box, ...], ...]
    makespan: float
    kinds: frozenset[Kind]
    num_microbatches: int
    names: tuple[str, ...]


def boxes_of(timeline: Timeline) -> TimelineLayout:
    """Lays out a timeline."""
    # Insertion order is the order of first appearance, so the same timeline always gets the same colours.
    names: dict[str, int] = {}
    titles, rows = [], []
    for title, spans in _rows(timeline):
        row: list[Box] = []
        for step, start, end in spans:
            row += _of_step(step, float(start - timeline.start), float(end - timeline.start), names)
        titles.append(title)
        rows.append(tuple(row))
    actions = [box for row in rows for box in row if box.is_action]
    return TimelineLayout(
        titles=tuple(titles),
        rows=tuple(rows),
        makespan=float(timeline.makespan),
        kinds=frozenset(box.kind for box in actions),
        num_microbatches=max((box.color_index for box in actions), default=-1) + 1,
        names=tuple(names),
    )


def _rows(timeline: Timeline) -> Iterator[tuple[str, Sequence[Span]]]:
    for rank, spans in enumerate(timeline.spans):
        yield f"rank {rank}", spans
        for lane in timeline.beside[rank] if timeline.beside else ():
            yield "beside", lane


def _of_step(step: object, start: float, end: float, names: dict[str, int]) -> tuple[Box, ...]:
    if isinstance(step, Divided):
        parts = step.parts()
        if len(parts) == 1:
            return (_of_part(parts[0], start, end),)
        # `upper` and `lower` are halves of the row: the upper half begins at 0.5, the lower one ends there.
        upper, lower = parts
        return _of_part(upper, start, end)._replace(lower=0.5), _of_part(lower, start, end)._replace(upper=0.5)
    label = str(step)
    match = _NAME.match(label)
    assert match is not None, "the pattern matches the empty text as well"
    # A label that begins with a number has no name before it, and then names itself.
    name = match[0].strip() or label
    return (Box(start, end, label, name, names.setdefault(name, len(names)), "F", is_action=False),)


def _of_part(part: Part, start: float, end: float) -> Box:
    return Box(start, end, part.label, str(part.number), part.number, part.kind)
