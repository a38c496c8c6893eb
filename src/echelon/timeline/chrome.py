"""Chrome trace of a timeline (Trace Event format, JSON), for ui.perfetto.dev and chrome://tracing.

A rank is a process. Its steps are one thread, and each of its lanes is another thread. A transfer is an arrow: a flow
event at the end of the sending span, and another at the start of the receiving span.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from echelon.arguments import writing
from echelon.errors import EchelonError
from echelon.timeline.palette import NAMES
from echelon.timeline.timeline import Divided, Span, Time, Timeline, Transfer

Event: TypeAlias = dict[str, object]

# Thread of a rank's steps. The threads of its lanes follow.
_STEPS = 0


def to_chrome(timeline: Timeline, path: str | os.PathLike[str], seconds: float = 1.0) -> None:
    """Writes a timeline into a file; see `Timeline.to_chrome`.

    Raises:
        EchelonError: `seconds` is not above 0.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise EchelonError(f"seconds={seconds}: give how long a unit of time is, such as 1.0 or 1e-3")
    with writing(path), open(path, "w", encoding="ascii") as file:
        # One event a line: a long trace can still be searched and compared with the usual tools.
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        separator = "\n"
        for event in _events(timeline, _Clock(timeline.start, seconds)):
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]}\n")


class _Clock(NamedTuple):
    """Conversion from the timeline's time to whole nanoseconds since its start."""

    start: Time
    seconds: float

    def nanoseconds(self, time: Time) -> int:
        return round(float(time - self.start) * self.seconds * 1e9)


def _events(timeline: Timeline, clock: _Clock) -> Iterator[Event]:
    for rank in range(timeline.num_ranks):
        yield _about(rank, _STEPS, "process_name", {"name": timeline.title_of(rank)})
        yield _about(rank, _STEPS, "process_sort_index", {"sort_index": rank})
        yield _about(rank, _STEPS, "thread_name", {"name": "steps"})
        for thread, _ in _lanes(timeline, rank):
            yield _about(rank, thread, "thread_name", {"name": "beside"})
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            yield _complete(rank, _STEPS, span, clock)
        for thread, lane in _lanes(timeline, rank):
            for span in lane:
                yield _complete(rank, thread, span, clock)
    for number, transfer in enumerate(timeline.transfers):
        yield from _arrow(timeline, transfer, number, clock)


def _lanes(timeline: Timeline, rank: int) -> Iterator[tuple[int, Sequence[Span]]]:
    """Yields each lane of a rank with the number of its thread."""
    yield from enumerate(timeline.beside[rank] if timeline.beside else (), _STEPS + 1)


def _about(rank: int, thread: int, what: str, args: Event) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def _complete(rank: int, thread: int, span: Span, clock: _Clock) -> Event:
    # Viewers round to nanoseconds. Rounding a start and a duration separately could make spans overlap.
    start = clock.nanoseconds(span.start)
    return {
        "ph": "X",
        "name": span.name,
        "cat": _category(span.step),
        "pid": rank,
        "tid": thread,
        # The format counts in microseconds.
        "ts": start / 1000,
        "dur": (clock.nanoseconds(span.end) - start) / 1000,
        "args": _details(span.step),
    }


def _category(step: object) -> str:
    if not isinstance(step, Divided):
        return "step"
    parts = step.parts()
    return NAMES[parts[0].kind] if len(parts) == 1 else "overlapped"


def _details(step: object) -> Event:
    if not isinstance(step, Divided):
        return {}
    parts = step.parts()
    return dict(parts[0].details) if len(parts) == 1 else {part.label: dict(part.details) for part in parts}


def _arrow(timeline: Timeline, transfer: Transfer, number: int, clock: _Clock) -> Iterator[Event]:
    starts, ends = timeline.starts[transfer.source_rank], timeline.ends[transfer.source_rank]
    first, last = clock.nanoseconds(starts[transfer.source]), clock.nanoseconds(ends[transfer.source])
    arrival = clock.nanoseconds(timeline.starts[transfer.target_rank][transfer.target])
    # A viewer binds an arrow to the span around its end. A span's own end is outside of it, so 1 ns is taken off.
    yield _end_of_arrow("s", transfer.source_rank, number, max(first, last - 1))
    # "bp": "e" binds to the enclosing span; by default the arrow would end at the next span.
    yield {**_end_of_arrow("f", transfer.target_rank, number, arrival), "bp": "e"}


def _end_of_arrow(phase: str, rank: int, number: int, time: int) -> Event:
    return {
        "ph": phase,
        "name": "transfer",
        "cat": "transfer",
        "id": number,
        "pid": rank,
        "tid": _STEPS,
        "ts": time / 1000,
    }
