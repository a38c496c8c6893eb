"""Record of a simulation: its trace, its timeline and the bytes sent."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from echelon.backends.formats.wire import Tag
from echelon.timeline.timeline import Span, Timeline, Transfer


class Event(NamedTuple):
    """One line of the trace: virtual time, rank (-1: none) and event."""

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


_COMPUTING = "compute"
"""Step of a span of measured computing."""


class Recorder:
    """Collector of a simulation's events and spans, in order."""

    def __init__(self, world_size: int) -> None:
        # Plain tuples instead of Events: one is made for each end of each message, and few traces are read.
        self.events: list[tuple[object, ...]] = []
        """Arguments of an `Event`, per event."""
        self.bytes_sent: Counter[tuple[int, int]] = Counter()
        self._spans: list[list[tuple[object, float, float]]] = [[] for _ in range(world_size)]
        self._goes_on = [False] * world_size
        """Whether the last span of a rank is computing that may go on."""
        self._beside: list[dict[int, list[Span]]] = [{} for _ in range(world_size)]
        """Spans of asynchronous collectives, per rank and lane."""
        self._transfers: list[Transfer] = []
        # Transfers that a later span may need. Its number, `target`, is not known yet.
        self._arrivals: dict[tuple[int, int, Tag], deque[Transfer]] = {}
        self._needed: list[list[Transfer]] = [[] for _ in range(world_size)]

    def sent(self, src: int, dst: int, tag: Tag, left: float, arrives: float) -> None:
        """Records that a message comes from the last span of `src`. Ignored if there is no span yet."""
        # The timeline needs causes: without an earlier span nothing that was computed led to this message.
        number = len(self._spans[src]) - 1
        self._goes_on[src] = False
        if number >= 0:
            self._arrivals.setdefault((dst, src, tag), deque()).append(Transfer(src, number, dst, -1, left, arrives))

    def took(self, rank: int, src: int, tag: Tag) -> None:
        """Records that the next span of `rank` needs the oldest message from `src` with that tag."""
        arrivals = self._arrivals.get((rank, src, tag))
        if arrivals:
            self._needed[rank].append(arrivals.popleft())
            if not arrivals:
                del self._arrivals[rank, src, tag]

    def span(self, rank: int, step: object, start: float, end: float) -> None:
        """Adds a span of a rank, with the messages that it needed."""
        number = len(self._spans[rank])
        self._goes_on[rank] = False
        self._spans[rank].append((step, start, end))
        self._transfers += (transfer._replace(target=number) for transfer in self._needed[rank])
        self._needed[rank].clear()

    def computed(self, rank: int, start: float, end: float) -> None:
        """Adds a span of measured computing between two calls. Consecutive ones become one.

        Messages that the rank has taken belong to the next span of a call or a step, which waited for them.
        """
        if end == start:
            return
        spans = self._spans[rank]
        # A message that has left comes from the whole span before it, so that one stays as it is.
        if spans and self._goes_on[rank] and spans[-1][2] == start:
            start = spans.pop()[1]
        spans.append((_COMPUTING, start, end))
        self._goes_on[rank] = True

    def span_beside(self, rank: int, lane: int, step: object, start: float, end: float) -> None:
        """Adds a span of a lane."""
        self._beside[rank].setdefault(lane, []).append(Span(step, start, end))

    def timeline(self) -> Timeline:
        """Returns all spans, and the transfers between them."""
        return Timeline(
            steps=tuple(tuple(step for step, _, _ in spans) for spans in self._spans),
            starts=tuple(tuple(start for _, start, _ in spans) for spans in self._spans),
            ends=tuple(tuple(end for _, _, end in spans) for spans in self._spans),
            transfers=tuple(self._transfers),
            beside=tuple(tuple(tuple(lane) for _, lane in sorted(lanes.items())) for lanes in self._beside),
            unit="s",
        )


def text_of(events: Iterable[tuple[object, ...]]) -> str:
    """Returns the trace as text, one line per event."""
    return "\n".join(str(Event(*event)) for event in events)  # type: ignore[arg-type]
