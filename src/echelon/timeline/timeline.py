"""Timeline of a run: one type for simulated and for recorded runs.

A `Timeline` holds each rank's steps with their starts and ends, the transfers between ranks, and lanes of spans that
ran concurrently with the steps, such as asynchronous collectives. A step is any object whose `str` is its name: an
action of a pipeline, or plain text. All times are in one unit of your choice: float, int or Fraction. With ints and
Fractions every result is exact.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple, Protocol, TypeAlias, TypeVar, overload, runtime_checkable

Time: TypeAlias = float | Fraction
"""Point in time, or duration."""

Item = TypeVar("Item")


Kind: TypeAlias = Literal["F", "I", "W", "B"]
"""F: forward. I: input gradient. W: weight gradient. B: both gradients at once."""


class Part(NamedTuple):
    """Part of a step in a picture. A step of two parts runs both at once."""

    kind: Kind
    number: int
    """The microbatch. It chooses the colour, and is written if the label does not fit."""
    label: str
    details: Mapping[str, int]
    """Shown by viewers of Chrome traces."""


@runtime_checkable
class Divided(Protocol):
    """Step that lists its parts. Any other step is drawn as text."""

    def parts(self) -> tuple[Part, ...]:
        """Returns one part or two, the upper one first."""
        ...


class Span(NamedTuple):
    """Step of a rank with its start and end."""

    step: object
    start: Time
    end: Time

    @property
    def name(self) -> str:
        """Text form of the step."""
        return str(self.step)

    @property
    def duration(self) -> Time:
        """Time from start to end."""
        return self.end - self.start


class Transfer(NamedTuple):
    """Data from a span to a span on another rank, which cannot start before it arrives.

    `source` is the index of the sending span in the order of `source_rank`, `target` the index of the receiving span in
    the order of `target_rank`. The data left at `start` and arrived at `end`. `end` is None in a recorded run, which
    does not measure arrivals.
    """

    source_rank: int
    source: int
    target_rank: int
    target: int
    start: Time
    end: Time | None


class Idle(NamedTuple):
    """Idle time of a rank by its cause. With `Timeline.busy` it adds up to the makespan."""

    warm_up: Time
    """Time before the first step."""
    other_ranks: Time
    """Time until another rank had computed the input of the next step."""
    transfer: Time
    """Time in which the input of the next step was in flight. In a recorded run: from its computation to that step."""
    overhead: Time
    """Time for which the timeline has no cause. 0 in a simulated run."""
    drain: Time
    """Time after the last step."""


class Critical(NamedTuple):
    """Span of the critical path, its place, and the transfer that it waited for. None if it waited for its own rank."""

    rank: int
    position: int
    span: Span
    transfer: Transfer | None


class LazySequence(Sequence[Item]):
    """Sequence that is computed on first access."""

    # A run of a million steps has as many transfers, and most users never read them.
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
    """Spans of all ranks of one run, simulated or recorded.

    Args:
        steps: For each rank, its steps in order.
        starts: For each rank, the start of each step. Never decreasing.
        ends: For each rank, the end of each step.
        transfers: Data that steps needed from other ranks.
        peak_activations: For each rank, the most activations held at once, in units of one stage's activation.
            Empty if the run has no activations.
        beside: For each rank, lanes of spans that ran concurrently with its steps. Spans of a lane do not overlap. They
            count neither as busy nor as idle. Empty if there are none.
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
        """Number of ranks."""
        return len(self.steps)

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """Spans of each rank, in order."""
        return tuple(
            tuple(map(Span, steps, starts, ends))
            for steps, starts, ends in zip(self.steps, self.starts, self.ends, strict=True)
        )

    @cached_property
    def start(self) -> Time:
        """First start on any rank, lanes included."""
        first = [starts[0] for starts in self.starts if starts]
        return min(first + [lane[0].start for lanes in self.beside for lane in lanes if lane], default=0.0)

    @cached_property
    def end(self) -> Time:
        """Last end on any rank, lanes included."""
        last = [ends[-1] for ends in self.ends if ends]
        return max(last + [lane[-1].end for lanes in self.beside for lane in lanes if lane], default=0.0)

    @property
    def makespan(self) -> Time:
        """Time from the first start to the last end."""
        return self.end - self.start

    @cached_property
    def span(self) -> Time:
        """Longest time of any rank from its own first start to its own last end."""
        # Unlike the makespan, this is the time of a step when steps follow each other: the warm-up of one step overlaps
        # with the drain of the step before.
        pairs = zip(self.starts, self.ends, strict=True)
        return max((ends[-1] - starts[0] for starts, ends in pairs if starts), default=0.0)

    @cached_property
    def busy(self) -> tuple[Time, ...]:
        """For each rank, the time spent in its steps."""
        # Sums the durations: subtracting two large sums would lose digits of a long run in float time. The start value
        # has the type of the times, so exact times stay exact.
        return tuple(
            sum((end - start for start, end in zip(starts, ends, strict=True)), start=type(self.end)(0))
            for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def bubble_rate(self) -> Time:
        """Share of `span` in which even the busiest rank is idle: (span - busy) / span. 0 is perfect."""
        if not self.span:
            return 0.0
        return _quotient(self.span - max(self.busy), self.span)

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """Idle time of each rank, by its cause."""
        return tuple(map(_Waits(self).idle, range(self.num_ranks)))

    @cached_property
    def critical_path(self) -> tuple[Critical, ...]:
        """Chain of spans that determines the makespan, in order of time: each started when the one before it ended.

        The run gets faster only if one of these spans, or a transfer between them, gets shorter.
        """
        return _Waits(self).critical_path()

    def draw(self, path: str | os.PathLike[str], against: Timeline | None = None) -> None:
        """Draws the timeline into a file, as SVG, PNG or PDF by its suffix.

        Args:
            path: File to write.
            against: Another timeline, drawn above; below if it was measured and this one is simulated. If they are in
                different units of time, equal work is drawn equally wide.

        Raises:
            EchelonError: matplotlib is not installed, or the suffix is none of .svg, .png and .pdf.
            FileError: the file cannot be written.
        """
        # Imported here because the module imports this one.
        from echelon.timeline.figure import draw

        draw(self, path, against)

    def to_chrome(self, path: str | os.PathLike[str], seconds: float = 1.0) -> None:
        """Writes the timeline as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

        Args:
            path: File to write.
            seconds: Length of a unit of the timeline's time, in seconds.

        Raises:
            EchelonError: `seconds` is not above 0.
            FileError: the file cannot be written.
        """
        from echelon.timeline.chrome import to_chrome

        to_chrome(self, path, seconds)


class _Waits:
    """Causes of the waits in a timeline: the transfers that its spans needed, by the span that needed them."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._incoming: dict[tuple[int, int], list[Transfer]] = {}
        for transfer in timeline.transfers:
            self._incoming.setdefault((transfer.target_rank, transfer.target), []).append(transfer)

    def awaited(self, rank: int, index: int) -> Transfer | None:
        """Returns the last transfer that a span waited for. None if its rank was still busy when it arrived."""
        awaited = max(self._incoming.get((rank, index), ()), key=_arrival, default=None)
        if awaited is None or (index > 0 and _arrival(awaited) <= self._timeline.ends[rank][index - 1]):
            return None
        return awaited

    def critical_path(self) -> tuple[Critical, ...]:
        """Walks back from the last span to end. Each span waited either for a transfer or for the step before it."""
        path: list[Critical] = []
        run = self._timeline
        ends = {rank: ends[-1] for rank, ends in enumerate(run.ends) if ends}
        rank = max(ends, key=lambda rank: ends[rank], default=-1)
        index = len(run.ends[rank]) - 1 if ends else -1
        while index >= 0:
            transfer = self.awaited(rank, index)
            # Not from `spans`, which would make one for each step of a long run.
            span = Span(run.steps[rank][index], run.starts[rank][index], run.ends[rank][index])
            path.append(Critical(rank, index, span, transfer))
            if transfer is None:
                index -= 1
            else:
                rank, index = transfer.source_rank, transfer.source
        return tuple(reversed(path))

    def idle(self, rank: int) -> Idle:
        """Divides the idle time of a rank by its causes."""
        run = self._timeline
        starts, ends = run.starts[rank], run.ends[rank]
        zero = type(run.end)(0)
        if not starts:
            return Idle(run.makespan, zero, zero, zero, zero)
        other_ranks = transfers = overhead = zero
        for index in range(1, len(starts)):
            free, start = ends[index - 1], starts[index]
            if start <= free:
                continue
            awaited = self.awaited(rank, index)
            if awaited is None:
                overhead += start - free
                continue
            # The gap from `free` to `start` is cut at two points, both clamped to it: measured times of two ranks may
            # contradict each other by the error of their clocks.
            made = min(max(free, awaited.start), start)
            arrived = start if awaited.end is None else min(max(made, awaited.end), start)
            other_ranks += made - free
            transfers += arrived - made
            overhead += start - arrived
        return Idle(starts[0] - run.start, other_ranks, transfers, overhead, run.end - ends[-1])


def _quotient(part: Time, whole: Time) -> Time:
    # Keeps exact times exact: int by int would become a float.
    if isinstance(part, int) and isinstance(whole, int):
        return Fraction(part, whole)
    return part / whole


def _arrival(transfer: Transfer) -> Time:
    """Returns the arrival of a transfer. Its start if the run did not measure arrivals."""
    return transfer.start if transfer.end is None else transfer.end


def summary(timeline: Timeline) -> str:
    """Returns the title of a picture, such as "simulated: makespan 24, bubble rate 20.0 %"."""
    parts = [
        f"makespan {number(timeline.makespan)}",
        f"bubble rate {100 * float(timeline.bubble_rate):.1f} %",
    ]
    if timeline.peak_activations:
        parts.append(f"peak activations {_per_rank(timeline.peak_activations)}")
    origin = {True: "measured: ", False: "simulated: ", None: ""}[is_measured(timeline)]
    return origin + ", ".join(parts)


def number(value: Time) -> str:
    """Returns a number with at most 4 digits."""
    # Enough to compare two runs, and short enough for a table.
    return f"{float(value):.4g}"


def is_measured(timeline: Timeline) -> bool | None:
    """Returns whether a timeline was recorded. None if it has no transfers, which alone would show it."""
    # Only a simulation knows when a transfer arrived.
    return next((transfer.end is None for transfer in timeline.transfers), None)


def _per_rank(values: tuple[Time, ...]) -> str:
    # More than 8 numbers would not fit a title: then the largest and the smallest.
    if len(values) > 8:
        return f"{number(max(values))} (rank {values.index(max(values))}) to {number(min(values))}"
    if len(list(groupby(values))) == 1:
        return number(values[0]) + (" on every rank" if len(values) > 1 else "")
    return " ".join(map(number, values))
