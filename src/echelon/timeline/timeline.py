"""What ranks did and when: one type for a simulated run and for a recorded one.

A `Timeline` holds, for each rank, the steps it ran with their starts and ends, and the transfers between ranks that the
steps waited for; and what ran beside the steps, such as asynchronous collectives. A step is anything whose `str` is its
name: an action of a pipeline, or plain text. Times are numbers of any one unit: float, int or Fraction (then every
result is exact).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Literal, NamedTuple, Protocol, TypeAlias, TypeVar, overload, runtime_checkable

Time: TypeAlias = float | Fraction
"""A point in time or a duration."""

Item = TypeVar("Item")


Kind: TypeAlias = Literal["F", "I", "W", "B"]
"""F: forward. I: input gradient. W: weight gradient. B: both gradients at once."""


class Part(NamedTuple):
    """Part of a step as pictures show it. A step of two parts runs both at once."""

    kind: Kind
    number: int
    """Chooses the colour, and is written where the label does not fit: the microbatch."""
    label: str
    details: Mapping[str, int]
    """Shown by viewers of Chrome traces."""


@runtime_checkable
class Divided(Protocol):
    """A step that says what its parts are. Any other step is drawn as text."""

    def parts(self) -> tuple[Part, ...]:
        """Returns one part or two, the upper one first."""
        ...


class Span(NamedTuple):
    """One step of one rank, from its start to its end."""

    step: object
    start: Time
    end: Time

    @property
    def name(self) -> str:
        """The text form of the step."""
        return str(self.step)

    @property
    def duration(self) -> Time:
        """How long the step took."""
        return self.end - self.start


class Transfer(NamedTuple):
    """What one span made and another, on another rank, needs before it can start.

    `source` is the index of the span that made it among the spans of `source_rank`, `target` that of the span that
    needs it among those of `target_rank`. It left at `start` and arrived at `end`; a recorded run cannot tell when it
    arrived (None).
    """

    source_rank: int
    source: int
    target_rank: int
    target: int
    start: Time
    end: Time | None


class Idle(NamedTuple):
    """What a rank waited for, in time. With `Timeline.busy` it adds up to the makespan."""

    warm_up: Time
    """Before its first step."""
    other_ranks: Time
    """Another rank had not yet made what its next step needs."""
    transfer: Time
    """What its next step needs was on its way. In a recorded run: was made, and no step in between."""
    overhead: Time
    """Nothing that the timeline knows of. 0 in a simulated run."""
    drain: Time
    """After its last step."""


class Critical(NamedTuple):
    """A span of the critical path, where it is, and the transfer that it waited for (None: its rank was not free)."""

    rank: int
    position: int
    span: Span
    transfer: Transfer | None


class LazySequence(Sequence[Item]):
    """A sequence that is made when it is first looked at. A run of a million steps has as many transfers."""

    def __init__(self, make: Callable[[], Iterable[Item]]) -> None:
        self._make = make

    @cached_property
    def _items(self) -> tuple[Item, ...]:
        return tuple(self._make())

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


@dataclass(frozen=True, repr=False)
class Timeline:
    """The spans of all ranks of one run, simulated or recorded.

    Args:
        steps: For each rank, what it ran, in order.
        starts: For each rank, when each step started. Never decreasing.
        ends: For each rank, when each step ended.
        transfers: What steps needed from other ranks.
        peak_activations: For each rank, the most activations held at once, in units of one stage's activation.
            Empty where that means nothing.
        beside: For each rank, lanes of spans that ran while its steps went on; those of a lane do not overlap. They
            count neither as busy nor as idle. Empty where nothing did.
    """

    steps: tuple[tuple[object, ...], ...]
    starts: tuple[tuple[Time, ...], ...]
    ends: tuple[tuple[Time, ...], ...]
    transfers: Sequence[Transfer] = field(default=(), compare=False)
    peak_activations: tuple[Time, ...] = ()
    beside: tuple[tuple[tuple[Span, ...], ...], ...] = ()

    def __repr__(self) -> str:
        count = sum(map(len, self.steps))
        return f"<Timeline of {self.num_ranks} ranks, {count} spans, makespan {self.makespan}>"

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.steps)

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each rank, its spans in order."""
        return tuple(
            tuple(map(Span, steps, starts, ends))
            for steps, starts, ends in zip(self.steps, self.starts, self.ends, strict=True)
        )

    @cached_property
    def start(self) -> Time:
        """The first start of any rank, of what ran beside too."""
        first = [starts[0] for starts in self.starts if starts]
        return min(first + [lane[0].start for lanes in self.beside for lane in lanes if lane], default=0.0)

    @cached_property
    def end(self) -> Time:
        """The last end of any rank, of what ran beside too."""
        last = [ends[-1] for ends in self.ends if ends]
        return max(last + [lane[-1].end for lanes in self.beside for lane in lanes if lane], default=0.0)

    @property
    def makespan(self) -> Time:
        """The time from the first start to the last end."""
        return self.end - self.start

    @cached_property
    def span(self) -> Time:
        """The longest time of any rank from its own first start to its own last end."""
        pairs = zip(self.starts, self.ends, strict=True)
        return max((ends[-1] - starts[0] for starts, ends in pairs if starts), default=0.0)

    @cached_property
    def busy(self) -> tuple[Time, ...]:
        """For each rank, the time spent in its steps."""
        # One subtraction of two sums would lose digits of a long run in float time.
        return tuple(
            sum((end - start for start, end in zip(starts, ends, strict=True)), start=type(self.end)(0))
            for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def bubble_rate(self) -> Time:
        """The part of `span` in which even the busiest rank is idle: (span - busy) / span. 0 is perfect."""
        if not self.span:
            return 0.0
        return _quotient(self.span - max(self.busy), self.span)

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """For each rank, what it waited for."""
        return tuple(map(self._idle, range(self.num_ranks)))

    @cached_property
    def critical_path(self) -> tuple[Critical, ...]:
        """What determined the makespan, first to last: each span started because the one before it ended.

        To be faster, one of these must be shorter, or a transfer between them.
        """
        path: list[Critical] = []
        ends = {rank: ends[-1] for rank, ends in enumerate(self.ends) if ends}
        rank = max(ends, key=lambda rank: ends[rank], default=-1)
        index = len(self.ends[rank]) - 1 if ends else -1
        while index >= 0:
            span = Span(self.steps[rank][index], self.starts[rank][index], self.ends[rank][index])
            transfer = self._awaited(rank, index)
            path.append(Critical(rank, index, span, transfer))
            if transfer is None:
                index -= 1
            else:
                rank, index = transfer.source_rank, transfer.source
        return tuple(reversed(path))

    @cached_property
    def _incoming(self) -> dict[tuple[int, int], list[Transfer]]:
        incoming: dict[tuple[int, int], list[Transfer]] = {}
        for transfer in self.transfers:
            incoming.setdefault((transfer.target_rank, transfer.target), []).append(transfer)
        return incoming

    def _awaited(self, rank: int, index: int) -> Transfer | None:
        """The transfer that a span waited for when its rank was free already: the last to arrive."""
        awaited = max(self._incoming.get((rank, index), ()), key=_arrival, default=None)
        if awaited is None or (index > 0 and _arrival(awaited) <= self.ends[rank][index - 1]):
            return None
        return awaited

    def _idle(self, rank: int) -> Idle:
        starts, ends = self.starts[rank], self.ends[rank]
        zero = type(self.end)(0)
        if not starts:
            return Idle(self.makespan, zero, zero, zero, zero)
        other_ranks = transfers = overhead = zero
        for index in range(1, len(starts)):
            free, start = ends[index - 1], starts[index]
            if start <= free:
                continue
            awaited = self._awaited(rank, index)
            if awaited is None:
                overhead += start - free
                continue
            made = min(max(free, awaited.start), start)
            arrived = start if awaited.end is None else min(max(made, awaited.end), start)
            other_ranks += made - free
            transfers += arrived - made
            overhead += start - arrived
        return Idle(starts[0] - self.start, other_ranks, transfers, overhead, self.end - ends[-1])

    def draw(self, path: str | os.PathLike[str], against: Timeline | None = None) -> None:
        """Draws the timeline into a file, as SVG, PNG or PDF by its suffix.

        Args:
            path: Where to write.
            against: Another timeline, drawn above, or below if it is a measured one and this is planned. The two may be
                in different units of time: then equal work is drawn equally wide.

        Raises:
            EchelonError: matplotlib is not installed, or the suffix is none of .svg, .png and .pdf.
            FileError: the file cannot be written.
        """
        from echelon.timeline.figure import draw

        draw(self, path, against)

    def to_chrome(self, path: str | os.PathLike[str], seconds: float = 1.0) -> None:
        """Writes the timeline as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

        Args:
            path: Where to write.
            seconds: How long a unit of the timeline's time is.

        Raises:
            EchelonError: `seconds` is not above 0.
            FileError: the file cannot be written.
        """
        from echelon.timeline.chrome import to_chrome

        to_chrome(self, path, seconds)


def _quotient(part: Time, whole: Time) -> Time:
    """Divides without leaving the exact numbers: int by int would become a float."""
    if isinstance(part, int) and isinstance(whole, int):
        return Fraction(part, whole)
    return part / whole


def _arrival(transfer: Transfer) -> Time:
    """When a transfer arrived, or could have at the earliest."""
    return transfer.start if transfer.end is None else transfer.end
