"""A step as it was played: its time, spans, exposed communication and memory. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from echelon.foresight.play.allocator import Memory, memory_of
from echelon.foresight.play.cluster import Cluster
from echelon.foresight.play.device import Device
from echelon.foresight.play.program import Program
from echelon.foresight.trace import Kernel, Message, Trace, alike_layers
from echelon.timeline.timeline import Gap, LazySequence, Span, Timeline

_FEW_RANKS = 2
"""Most ranks of a group that are listed one by one in place of a name."""


class RunSpan(NamedTuple):
    """Kernels of one stream in a row, from the start of the first to the end of the last."""

    entries: tuple[int, ...]
    stream: int
    start: float
    end: float
    launching: float = 0.0
    """Part of the time in which no kernel runs, since the host has not launched the next one yet."""


class CommunicationSpan(NamedTuple):
    """A collective or a message."""

    entry: int
    """Index in the trace."""
    ready: float
    """Time at which this rank has arrived."""
    start: float
    """Time at which all members have arrived."""
    end: float
    algorithm: str
    protocol: str


class CopySpan(NamedTuple):
    """A copy between the host and its GPU."""

    entry: int
    """Index in the trace."""
    stream: int
    start: float
    end: float


class KernelTime(NamedTuple):
    """A kernel in its run. Delays are shared out evenly over a run."""

    entry: int
    """Index in the trace."""
    stream: int
    start: float
    end: float


class ExposedPart(NamedTuple):
    """Interval of a communication in which no kernel runs."""

    span: CommunicationSpan
    start: float
    end: float


class Shares(NamedTuple):
    """Parts of a role's step, each as a share of it, 0 to 1. They add up to 1."""

    kernels: Mapping[str, float]
    """Kernels that have the device to themselves, by kind: "matmul", "attention", "other"."""
    contention: float
    """Extra time of kernels, because communication or other ranks use a part of the device."""
    exposed: float
    """Communication that no kernel hides."""
    waiting: float
    """Nothing runs, and a stream waits for other ranks to arrive at a communication."""
    idle: float
    """Nothing runs for another reason: the host has not launched the next kernel yet."""
    copies: float = 0.0
    """Copies between the host and its GPU that neither kernels nor communication hide."""
    host: float = 0.0
    """Operators that the host computes itself, while the GPU does nothing."""


class Exposed(NamedTuple):
    """Communication of one group called at one line."""

    group: str
    """Name of the group, as by `group_text`."""
    place: str


@dataclass(frozen=True)
class PlayedRole:
    """Step of one role."""

    program: Program
    seconds: float
    runs: tuple[RunSpan, ...]
    communication: tuple[CommunicationSpan, ...]
    """In the order of their starts."""
    hosts: tuple[float, ...]
    """Time of the host before each operation, and at the end."""
    waits: tuple[tuple[float, float], ...] = ()
    """Intervals in which a stream waits until the other sides of a communication arrive, by start."""
    copies: tuple[CopySpan, ...] = ()
    """Copies between the host and its GPU, in the order of their ends."""
    computed: tuple[tuple[float, float], ...] = ()
    """Intervals in which the host computes operators itself."""

    @cached_property
    def computing(self) -> tuple[tuple[float, float], ...]:
        """Intervals in which any stream computes. Intervals that touch are merged."""
        return _merged((run.start, run.end) for run in self.runs)

    @cached_property
    def kernel_seconds(self) -> Mapping[str, float]:
        """Time of kernels that have the device to themselves, by kind: "matmul", "attention", "other"."""
        total: dict[str, float] = {"matmul": 0.0, "attention": 0.0, "other": 0.0}
        for index, seconds in self.program.kernel_seconds.items():
            total[self.program.trace.kernel(index).kind] += seconds
        return total

    @cached_property
    def other_seconds(self) -> Mapping[str, float]:
        """Time of the kernels of kind "other" by the name of their operator, the longest first."""
        found: dict[str, float] = defaultdict(float)
        for index, seconds in self.program.kernel_seconds.items():
            kernel = self.program.trace.kernel(index)
            if kernel.kind == "other":
                found[kernel.name] += seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @cached_property
    def shares(self) -> Shares:
        """Parts of the step. All 0 if it takes no time."""
        if not self.seconds:
            return Shares(dict.fromkeys(self.kernel_seconds, 0.0), 0.0, 0.0, 0.0, 0.0)
        computing = sum(end - start for start, end in self.computing)
        # Runs of kernels are longer than their kernels. Of measured times, rounding may leave less than nothing.
        besides_kernels = max(0.0, computing - sum(self.kernel_seconds.values()))
        # Runs span the gaps between their launches, which are idle time and no contention.
        launching = max(0.0, min(besides_kernels, sum(run.launching for run in self.runs)))  # not -0.0 % by rounding
        exposed = sum(self.exposed.values())
        busy = _merged((*self.computing, *((span.start, span.end) for span in self.communication)))
        copying = _merged((span.start, span.end) for span in self.copies)
        copies, host = _outside(copying, busy), _outside(_merged(self.computed), _merged((*busy, *copying)))
        # A stream may wait while communication of another one is exposed, and counts as that.
        waiting = max(0.0, min(self.waiting, self.seconds - computing - exposed - copies - host))
        idle = launching + max(0.0, self.seconds - computing - exposed - copies - host - waiting)
        kernels = {kind: seconds / self.seconds for kind, seconds in self.kernel_seconds.items()}
        parts = besides_kernels - launching, exposed, waiting, idle, copies, host
        return Shares(kernels, *(part / self.seconds for part in parts))

    @cached_property
    def exposed(self) -> Mapping[Exposed, float]:
        """Seconds in which no kernel runs and communication does, by group and line.

        While several communications run, the time counts for the one that started first. Time before all members have
        arrived does not count.
        """
        found: dict[Exposed, float] = defaultdict(float)
        trace = self.program.trace
        for span, start, end in self.exposed_parts:
            entry = trace.communication(span.entry)
            found[Exposed(group_text(trace, entry.group), trace.line(entry, ""))] += end - start
        return dict(found)

    @cached_property
    def exposed_modules(self) -> Mapping[Exposed, tuple[str, ...]]:
        """Modules of exposed communication by group and line, in the order of their calls. Alike layers are one."""
        found: dict[Exposed, dict[str, None]] = defaultdict(dict)
        trace = self.program.trace
        for span, _, _ in self.exposed_parts:
            entry = trace.communication(span.entry)
            if entry.module >= 0:
                name = Exposed(group_text(trace, entry.group), trace.line(entry, ""))
                found[name][alike_layers(trace.modules[entry.module])] = None
        return {name: tuple(modules) for name, modules in found.items()}

    @cached_property
    def exposed_parts(self) -> tuple[ExposedPart, ...]:
        """Intervals in which no kernel runs and communication does."""
        spans = self.communication
        parts = self._without_kernels((span.start, span.end) for span in spans)
        return tuple(ExposedPart(spans[index], start, end) for index, start, end in parts)

    @cached_property
    def has_messages(self) -> bool:
        """Whether the role sends or receives messages, as a stage of a pipeline does."""
        return any(type(entry) is Message for entry in self.program.trace.entries)

    @cached_property
    def waiting(self) -> float:
        """Seconds in which no kernel runs and a stream waits until the other sides of a communication arrive."""
        return sum((end - start for _, start, end in self._without_kernels(self.waits)), 0.0)

    def idle_causes(self) -> Iterator[Gap]:
        """Yields the intervals in which no kernel runs and communication does, or a stream waits for other ranks."""
        exposed = _merged((start, end) for _, start, end in self.exposed_parts)
        waiting = _merged((start, end) for _, start, end in self._without_kernels(self.waits))
        causes = [Gap(start, end, "transfer") for start, end in exposed]
        causes += [Gap(start, end, "other_ranks") for start, end in _parts_outside(waiting, exposed)]
        yield from sorted(causes)

    def _without_kernels(self, intervals: Iterable[tuple[float, float]]) -> Iterator[tuple[int, float, float]]:
        """Yields the parts of intervals in which no kernel runs, as (number of the interval, start, end).

        Intervals come by start. Where several overlap, the time counts for the first.
        """
        gaps, at, covered = list(_parts_outside([(0.0, self.seconds)], self.computing)), 0, 0.0
        for number, (start, end) in enumerate(intervals):
            begin, covered = max(start, covered), max(covered, end)
            # Later intervals begin no earlier, so these gaps are over for them as well.
            while at < len(gaps) and gaps[at][1] <= begin:
                at += 1
            for opening, closing in islice(gaps, at, None):
                if opening >= end:
                    break
                first, last = max(opening, begin), min(closing, end)
                if first < last:
                    yield number, first, last

    def kernel_times(self) -> Iterator[KernelTime]:
        """Yields the kernels with their times, by their runs."""
        seconds = self.program.kernel_seconds
        for run in self.runs:
            total = sum(seconds[index] for index in run.entries)
            stretch = (run.end - run.start) / total if total else 0.0
            time = run.start
            for index in run.entries:
                end = min(time + seconds[index] * stretch, run.end)
                yield KernelTime(index, run.stream, time, end)
                time = end

    def kernel_spans(self) -> Mapping[int, tuple[Span, ...]]:
        """Returns the kernels of each stream with their times."""
        streams: dict[int, list[Span]] = defaultdict(list)
        for index, stream, start, end in self.kernel_times():
            streams[stream].append(Span(self.program.trace.kernel(index).name, start, end))
        return {stream: tuple(spans) for stream, spans in streams.items()}

    def copy_spans(self) -> Mapping[str, tuple[Span, ...]]:
        """Returns the copies between the host and its GPU by their direction."""
        found: dict[str, list[Span]] = {}
        for copy in self.copies:
            name = "copy to GPU" if self.program.trace.copy(copy.entry).to_gpu else "copy to host"
            found.setdefault(name, []).append(Span(name, copy.start, copy.end))
        return {name: tuple(spans) for name, spans in sorted(found.items())}

    def phase_spans(self) -> tuple[Span, ...]:
        """Returns the default stream's kernels by phase, such as "backward", or by their step of a schedule."""
        trace = self.program.trace
        steps = {index: step for begin, end, step in trace.computed for index in range(begin, end)}
        spans: list[Span] = []
        for index, stream, start, end in self.kernel_times():
            if stream:
                continue
            step = steps.get(index, trace.kernel(index).phase)
            # Ends and starts of neighbours differ by rounding.
            if spans and spans[-1].step == step and start - spans[-1].end <= 1e-9:
                spans[-1] = Span(step, spans[-1].start, end)
            else:
                spans.append(Span(step, start, end))
        return tuple(spans)

    def lanes(self) -> Mapping[tuple[int, int], Sequence[CommunicationSpan]]:
        """Returns the communication of each group, by the group's index and the level of overlap."""
        lanes: dict[tuple[int, int], list[CommunicationSpan]] = {}
        for span in self.communication:
            group, level = self.program.trace.communication(span.entry).group, 0
            while (lane := lanes.get((group, level))) and lane[-1].end > span.start:
                level += 1
            lanes.setdefault((group, level), []).append(span)
        return dict(sorted(lanes.items()))


@dataclass(frozen=True)
class Played:
    """A step of all ranks.

    Args:
        roles: The step of each recorded rank.
        classes: The role of every rank.
        device: Device that it was played on.
        cluster: Network that it was played on.
        assumptions: Approximations of the player.
    """

    roles: Mapping[int, PlayedRole]
    classes: Mapping[int, int] | Sequence[int]
    device: Device
    cluster: Cluster
    assumptions: tuple[str, ...] = ()

    @cached_property
    def seconds(self) -> float:
        """Time of the step: until the last rank has ended."""
        return self.slowest.seconds

    @cached_property
    def slowest(self) -> PlayedRole:
        """The role that ends last. The first one if several do."""
        return max(self.roles.values(), key=lambda role: role.seconds)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.cluster.world_size

    @cached_property
    def exposed(self) -> Mapping[Exposed, float]:
        """Seconds of communication that no kernel hides, by group and line, on the rank that ends last.

        The longest comes first. Other ranks may wait there, or have other lines.
        """
        return dict(sorted(self.slowest.exposed.items(), key=lambda item: -item[1]))

    @property
    def exposed_modules(self) -> Mapping[Exposed, tuple[str, ...]]:
        """Modules of `exposed` by group and line. Alike layers are one."""
        return self.slowest.exposed_modules

    @cached_property
    def model_flops(self) -> float:
        """Floating-point operations of all ranks in forward and backward, without recomputation and optimizers."""
        per_role = {
            rank: sum(
                # The backward of attention computes the scores again: one of its five products.
                entry.flops * 4 / 5 if entry.kind == "attention" and "backward" in entry.name else entry.flops
                for entry in role.program.trace.entries
                if type(entry) is Kernel and entry.phase not in ("recompute", "optimizer")
            )
            for rank, role in self.roles.items()
        }
        return float(sum(per_role[self.classes[rank]] for rank in range(self.world_size)))

    @property
    def mfu(self) -> float:
        """Model FLOPs, divided by the FLOPs of all devices at their dense bfloat16 peak in the same time."""
        peak = self.device.peak_of("bfloat16") * self.world_size
        return self.model_flops / (self.seconds * peak) if self.seconds else 0.0

    @cached_property
    def bubbles(self) -> Mapping[int, float]:
        """Seconds of each role's bubble: it computes nothing and waits for other ranks. Empty without messages.

        The time between the end of a rank and that of the last one counts, since the rank waits in the next step.
        """
        if not any(role.has_messages for role in self.roles.values()):
            return {}
        return {rank: role.waiting + self.seconds - role.seconds for rank, role in self.roles.items()}

    @property
    def bubble(self) -> float:
        """Share of a step in which a device computes nothing because it waits for messages, 0 to 1: mean of all ranks.

        0 without messages. The messages' own time counts as exposed communication instead.
        """
        if not self.bubbles or not self.seconds:
            return 0.0
        total = sum(self.bubbles[self.classes[rank]] for rank in range(self.world_size))
        return total / (self.world_size * self.seconds)

    def memory(self) -> Mapping[int, Memory]:
        """Returns the memory of each role."""
        limit = self.device.memory_bytes
        return {rank: memory_of(role.program.trace, limit) for rank, role in self.roles.items()}

    def timeline(self, *, kernels: bool = False) -> Timeline:
        """Returns a timeline with a row for each role: its default stream, with other streams and groups beside it.

        Args:
            kernels: Whether each kernel is a span. Otherwise a phase, such as backward, is one.
        """
        rows: list[tuple[Span, ...]] = []
        beside: list[tuple[tuple[Span, ...], ...]] = []
        for role in self.roles.values():
            streams = role.kernel_spans()
            rows.append(streams.get(0, ()) if kernels else role.phase_spans())
            lanes = [spans for stream, spans in sorted(streams.items()) if stream]
            beside.append((*lanes, *role.copy_spans().values(), *_communication_spans(role)))
        return Timeline(
            steps=tuple(tuple(span.step for span in row) for row in rows),
            starts=tuple(tuple(span.start for span in row) for row in rows),
            ends=tuple(tuple(span.end for span in row) for row in rows),
            beside=tuple(beside),
            titles=tuple(f"rank {rank}" for rank in self.roles),
            unit="s",
            causes=LazySequence(lambda: [tuple(role.idle_causes()) for role in self.roles.values()]),
            # Without messages of a pipeline nothing is a bubble.
            bubble_share=self.bubble if self.bubbles else math.nan,
        )


def _merged(intervals: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Returns intervals by start, with neighbours that touch joined."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return tuple(merged)


def _parts_outside(
    intervals: Iterable[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """Yields the parts of intervals that lie in no others. Both are merged."""
    for start, end in intervals:
        at = start
        for index in range(max(0, bisect_left(others, (start, start)) - 1), len(others)):
            opening, closing = others[index]
            if opening >= end:
                break
            if opening > at:
                yield at, opening
            at = max(at, closing)
        if at < end:
            yield at, end


def _outside(intervals: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Returns the length of intervals without the parts that lie in others. Both are merged."""
    return sum((end - start for start, end in _parts_outside(intervals, others)), 0.0)


def group_text(trace: Trace, index: int) -> str:
    """Returns the name of a group, such as "dp". Without a name its ranks, such as "ranks 0-7" or "all ranks"."""
    ranks, name, _ = trace.groups[index]
    if name:
        return name
    if len(ranks) == trace.world_size:
        return "all ranks"
    if len(ranks) <= _FEW_RANKS:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"ranks {ranks[0]}-{ranks[-1]}" if ranks[-1] - ranks[0] == len(ranks) - 1 else f"{len(ranks)} ranks"


def _communication_spans(role: PlayedRole) -> Iterator[tuple[Span, ...]]:
    trace = role.program.trace
    for (group, _), spans in role.lanes().items():
        kinds = (trace.communication(span.entry).kind for span in spans)
        named = zip(kinds, spans, strict=True)
        yield tuple(Span(f"{kind} {trace.groups[group].name}".strip(), span.start, span.end) for kind, span in named)
