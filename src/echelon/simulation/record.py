"""What is written down while a simulation runs: its trace, its timeline and what it sent."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from echelon.backends.formats.wire import Tag
from echelon.timeline.timeline import Span, Timeline, Transfer


class Event(NamedTuple):
    """One line of the trace: at what time which rank (-1: none) did what."""

    time: float
    rank: int
    what: str
    num_bytes: int = 0
    peer: int = -1
    tag: Tag | None = None
    note: str = ""

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else "simulation"
        text = f"{self.time!r} {who} {self.what}"
        if self.tag is None:
            return text
        return f"{text} {self.peer}: {self.num_bytes} B, {self.tag}" + (f", {self.note}" if self.note else "")


class Arrival(NamedTuple):
    """Where and when a message that a span may need was sent, and when it arrived."""

    source_rank: int
    source: int
    """Number of the last span of that rank when it was sent."""
    start: float
    end: float


class Recorder:
    """Collects what happens, in order."""

    def __init__(self, world_size: int) -> None:
        self.events: list[tuple[object, ...]] = []
        """Of each event what makes an `Event`: a tuple is all that there is time for."""
        self.bytes_sent: Counter[tuple[int, int]] = Counter()
        self._spans: list[list[tuple[object, float, float]]] = [[] for _ in range(world_size)]
        self._beside: list[dict[int, list[Span]]] = [{} for _ in range(world_size)]
        """For each rank, the spans of each of its lanes."""
        self._transfers: list[Transfer] = []
        self._arrivals: dict[tuple[int, int, Tag], deque[Arrival]] = {}
        self._needed: list[list[Arrival]] = [[] for _ in range(world_size)]

    def sent(self, src: int, dst: int, tag: Tag, left: float, arrives: float) -> None:
        """Remembers what a message from `src` was made by: its last span."""
        number = len(self._spans[src]) - 1
        if number >= 0:
            self._arrivals.setdefault((dst, src, tag), deque()).append(Arrival(src, number, left, arrives))

    def took(self, rank: int, src: int, tag: Tag) -> None:
        """Says that the next span of `rank` needs the oldest message from `src` with that tag."""
        arrivals = self._arrivals.get((rank, src, tag))
        if arrivals:
            self._needed[rank].append(arrivals.popleft())
            if not arrivals:
                del self._arrivals[rank, src, tag]

    def span(self, rank: int, step: object, start: float, end: float) -> None:
        """Adds a span of a rank, which has just ended."""
        number = len(self._spans[rank])
        self._spans[rank].append((step, start, end))
        for arrival in self._needed[rank]:
            self._transfers.append(
                Transfer(arrival.source_rank, arrival.source, rank, number, arrival.start, arrival.end)
            )
        self._needed[rank].clear()

    def span_beside(self, rank: int, lane: int, step: object, start: float, end: float) -> None:
        """Adds a span of a lane, which has just ended."""
        self._beside[rank].setdefault(lane, []).append(Span(step, start, end))

    def timeline(self) -> Timeline:
        """Returns all spans, and what passed between them."""
        return Timeline(
            steps=tuple(tuple(step for step, _, _ in spans) for spans in self._spans),
            starts=tuple(tuple(start for _, start, _ in spans) for spans in self._spans),
            ends=tuple(tuple(end for _, _, end in spans) for spans in self._spans),
            transfers=tuple(self._transfers),
            beside=tuple(tuple(tuple(lane) for _, lane in sorted(lanes.items())) for lanes in self._beside),
        )


def text_of(events: Iterable[tuple[object, ...]]) -> str:
    """Returns the trace as text, one line per event."""
    return "\n".join(str(Event(*event)) for event in events)  # type: ignore[arg-type]
