"""Timeline of a run: one type for simulated and for recorded runs.

A `Timeline` holds each rank's steps with their starts and ends, the transfers between ranks, and lanes of spans that
ran concurrently with the steps, such as asynchronous collectives. A step is any object whose `str` is its name: an
action of a pipeline, or plain text. All times are in one unit of your choice: float, int or Fraction. With ints and
Fractions every result is exact.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Literal,
    NamedTuple,
    NoReturn,
    Protocol,
    TypeAlias,
    TypeVar,
    overload,
    runtime_checkable,
)

from echelon.arguments import no_attribute, refuse_others

Time: TypeAlias = float | Fraction
"""Point in time, or duration."""

Item = TypeVar("Item")


Kind: TypeAlias = Literal["F", "I", "W", "B"]
"""F: forward. I: input gradient. W: weight gradient. B: both gradients at once."""


class Part(NamedTuple):
    """Part of a step in a picture. A step of two parts runs both at once."""

    kind: Kind
    number: int
    """The microbatch, which is written into the box."""
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


Cause: TypeAlias = Literal["warm_up", "other_ranks", "transfer", "overhead", "drain"]
"""Cause of idle time: a field of `Idle`."""


class Gap(NamedTuple):
    """Idle time of a rank, with its cause."""

    start: Time
    end: Time
    cause: Cause


class Level(NamedTuple):
    """Memory that a rank holds from a point in time until the next level."""

    time: Time
    amount: Time


Unit: TypeAlias = Literal["", "s"]
"""Unit of time: seconds, or that of a plan, such as one forward."""
MemoryUnit: TypeAlias = Literal["", "activations", "B"]
"""Unit of memory: bytes, activations of one stage, or that of `Costs.activation`."""


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


_PATHS = dict.fromkeys(("file", "filename", "fname"), "path")
_MEANT = {
    **dict.fromkeys(("save", "savefig", "plot", "show", "to_svg", "to_png", "to_html"), " write draw('plan.svg')"),
    **dict.fromkeys(("export", "to_json", "export_chrome_trace", "to_perfetto"), " write to_chrome('trace.json')"),
    **dict.fromkeys(("bubble", "bubble_ratio", "bubble_fraction"), "bubble_rate"),
    **dict.fromkeys(("elapsed", "duration", "total_time", "time"), "makespan"),
}
"""Names by which users look for attributes."""


@dataclass(frozen=True, repr=False)
class Timeline:
    """Spans of all ranks of one run, simulated or recorded.

    Times and rates are exact where the costs are: ints and Fractions. Formats such as `:.1f` take no Fraction before
    Python 3.12, so convert them to print: `f"{float(timeline.bubble_rate):.1%}"`.

    Args:
        steps: For each rank, its steps in order.
        starts: For each rank, the start of each step. Never decreasing.
        ends: For each rank, the end of each step.
        transfers: Data that steps needed from other ranks.
        peak_activations: For each rank, the most activations held at once, in units of one stage's activation.
            Empty if the run has no activations.
        beside: For each rank, lanes of spans that ran concurrently with its steps. Spans of a lane do not overlap. They
            count neither as busy nor as idle. Empty if there are none.
        name: Name of the schedule or plan, for the title of a picture.
        titles: Title of each rank in a picture. Empty for "rank 0", "rank 1" and so on.
        unit: Unit of time.
        memory: For each rank, the memory that it holds, in order of time. Empty if it is not known.
        memory_unit: Unit of `memory`.
        causes: For each rank, known causes of idle time that no transfer explains, in order of time. They do not
            overlap. Empty if there are none.
        bubble_share: Share of the time in which ranks wait for others, which a title names in place of `bubble_rate`.
            NaN for a title without either. None: not known.
    """

    steps: tuple[tuple[object, ...], ...]
    starts: tuple[tuple[Time, ...], ...]
    ends: tuple[tuple[Time, ...], ...]
    # Not compared: a lazy sequence equals itself alone.
    transfers: Sequence[Transfer] = field(default=(), compare=False)
    peak_activations: tuple[Time, ...] = ()
    beside: tuple[tuple[tuple[Span, ...], ...], ...] = ()
    # Not compared: what ran and when is equal, whatever it is called.
    name: str = field(default="", compare=False)
    titles: tuple[str, ...] = field(default=(), compare=False)
    unit: Unit = field(default="", compare=False)
    memory: Sequence[Sequence[Level]] = field(default=(), compare=False)
    memory_unit: MemoryUnit = field(default="", compare=False)
    causes: Sequence[Sequence[Gap]] = field(default=(), compare=False)
    bubble_share: float | None = field(default=None, compare=False)

    if not TYPE_CHECKING:  # type checkers report the name themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute("a Timeline", name, dir(type(self)) if name[:1] != "_" else (), _MEANT)

    def __str__(self) -> str:
        from echelon.timeline.terminal import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from echelon.timeline.page import notebook_cell

        return notebook_cell(self)

    def __repr__(self) -> str:
        count = sum(map(len, self.steps))
        return f"<Timeline of {self.num_ranks} ranks, {count} spans, makespan {self.makespan}>"

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.steps)

    def title_of(self, rank: int) -> str:
        """Returns the title of a rank in a picture, such as "rank 0"."""
        return self.titles[rank] if self.titles else f"rank {rank}"

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
        """Share of `span` in which even the busiest rank is idle: (span - busy) / span. 0 is perfect.

        A Fraction if the times are ints or Fractions: print `float(timeline.bubble_rate)`. NaN if no step takes time,
        as in a simulation without costs.
        """
        if not self.span:
            return math.nan if any(self.steps) else 0.0
        return _quotient(self.span - max(self.busy), self.span)

    @cached_property
    def gaps(self) -> tuple[tuple[Gap, ...], ...]:
        """Idle time of each rank, in order of time."""
        from echelon.timeline.waits import Waits

        waits = Waits(self)
        return tuple(tuple(waits.gaps(rank)) for rank in range(self.num_ranks))

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """Idle time of each rank, by its cause."""
        from echelon.timeline.waits import total

        return tuple(total(gaps, type(self.end)(0)) for gaps in self.gaps)

    @cached_property
    def critical_path(self) -> tuple[Critical, ...]:
        """Chain of spans that determines the makespan, in order of time: each started when the one before it ended.

        The run gets faster only if one of these spans, or a transfer between them, gets shorter.
        """
        from echelon.timeline.waits import Waits

        return Waits(self).critical_path()

    @refuse_others(**_PATHS)
    def draw(
        self,
        path: str | os.PathLike[str],
        against: Timeline | None = None,
        *,
        theme: Literal["light", "dark"] = "light",
    ) -> None:
        """Draws the timeline into a file, as SVG, PNG, PDF or HTML by its suffix.

        A colour is a kind of step, and the number in a box its microbatch. Idle time is shaded by its cause. A line
        follows the critical path. The strip below a rank is the memory that it holds.

        An HTML file is one page that needs no network, in which one zooms, points at steps and searches them.

        Args:
            path: File to write.
            against: Another timeline, drawn above; below if it was measured and this one is simulated. If they are in
                different units of time, equal work is drawn equally wide.
            theme: Colours around the boxes. An HTML file follows the reader's own choice.

        Raises:
            EchelonError: matplotlib is not installed, which all but HTML need, or the suffix is none of .svg, .png,
                .pdf and .html.
            InvalidArgument: there is no such theme.
            FileError: the file cannot be written.

        Warns:
            UserWarning: no step takes any time, as in a simulation without costs.
        """
        # Imported here because the module imports this one.
        from echelon.timeline.drawing import draw

        draw(self, path, against, theme)

    @refuse_others(**_PATHS)
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


def _quotient(part: Time, whole: Time) -> Time:
    # Keeps exact times exact: int by int would become a float.
    if isinstance(part, int) and isinstance(whole, int):
        return Fraction(part, whole)
    return part / whole
