"""A timeline as plain text, a row per rank, time from left to right: for docstrings, tests and small schedules."""

from __future__ import annotations

import math

from echelon.pipeline.action import Overlapped
from echelon.trace import Span, Timeline


def picture(timeline: Timeline) -> str:
    """Draws a timeline: "0F2" as it starts, hyphens while it goes on, blanks while the rank is idle.

    A unit of time is as wide as the shortest step needs; steps that take no time are left out.
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
    if isinstance(span.step, Overlapped):
        return f"{span.step.forward};{span.step.backward}"
    return span.name
