"""A trace lowered for the player: kernels of one stream in a row become one operation. Pure.

Kernels that follow each other on a stream act on two clocks, those of the host and of the stream. Their effect has a
closed form. Kernel i takes d_i on the device and h_i on the host. The host arrives at time a. The stream is free from
time s on. The host leaves at a + sum h. The last kernel ends at max(s + sum d, a + c), where c is the largest
h_1 + ... + h_i + d_i + ... + d_n. So a step of 5,000 entries is played as a few hundred operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from echelon.foresight.play.device import Device
from echelon.foresight.trace import (
    Allocate,
    Collective,
    Copy,
    Free,
    HostKernel,
    HostWait,
    Kernel,
    Message,
    RecordEvent,
    Trace,
    Wait,
    WaitEvent,
)


class Run(NamedTuple):
    """Kernels of one stream in a row."""

    stream: int
    seconds: float
    """Time of all kernels, one after another."""
    least: float
    """Time from the arrival of the host to the end of the last kernel, on a stream that is free."""
    host: float
    """Time of the host."""
    entries: tuple[int, ...]
    """Indices of the kernels in the trace."""


class Transfer(NamedTuple):
    """A copy between the host and its GPU, on a stream and on the copy engine of its direction."""

    stream: int
    seconds: float
    """Time that it takes once the engine is free."""
    to_gpu: bool
    entry: int


class HostRun(NamedTuple):
    """An operator that the host computes itself."""

    seconds: float


class Post(NamedTuple):
    """A collective, or messages that begin together, put on a queue of communication."""

    stream: int
    queue: tuple[str, int]
    """Queue whose communication starts in the order of its calls: ("group", index), or ("peer", rank) of lone messages.

    Without NCCL, lone messages have ("to", rank) and ("from", rank). A message that need not wait for others has a
    queue of its own, ("message", index).
    """
    entries: tuple[int, ...]
    blocking: bool


class Mark(NamedTuple):
    """An event recorded on a stream."""

    stream: int
    event: int
    """Index of this operation."""


class Await(NamedTuple):
    """A stream that waits: for an event, or for the end of communication."""

    stream: int
    event: int
    """Index of the operation that recorded it. -1: for communication."""
    communication: int
    """Index of a communication in the trace. -1: for `event`."""
    entry: int


class HostAwait(NamedTuple):
    """The host waits for a stream (-1: for all), or for an event."""

    stream: int
    event: int
    entry: int


Operation: TypeAlias = Run | Post | Mark | Await | HostAwait | Transfer | HostRun


@dataclass(frozen=True)
class Program:
    """Operations of one trace on one device."""

    trace: Trace
    operations: tuple[Operation, ...]
    kernel_seconds: dict[int, float]
    """Time of each kernel, by its index in the trace."""


def lower(trace: Trace, device: Device) -> Program:
    """Returns the operations of a trace on a device."""
    lowering = _Lowering(trace, device)
    begin = 0
    measured = (*trace.measured, (len(trace.entries), 0.0)) if trace.measured else ((len(trace.entries), None),)
    for end, seconds in measured:
        share = None if seconds is None else lowering.share(range(begin, end), seconds)
        for index in range(begin, end):
            entry = trace.entries[index]
            kind = type(entry)
            if kind is Kernel:
                lowering.kernel(index, entry, share)  # type: ignore[arg-type]
            elif kind is not Allocate and kind is not Free:
                lowering.other(index, entry)
        begin = max(begin, end)
    return lowering.program()


class _Lowering:
    def __init__(self, trace: Trace, device: Device) -> None:
        self._trace = trace
        self._device = device
        self._operations: list[Operation] = []
        self._seconds: dict[int, float] = {}
        self._stream = -1
        self._run: list[int] = []
        self._total = 0.0
        self._least = 0.0
        self._host = 0.0
        self._recorded: dict[int, int] = {}
        """Last recording of each event, by the number of its operation: an event can be recorded again."""
        self._posted: dict[int, int] = {}
        """Index of the last communication of each number."""
        self._batch: list[int] = []

    def share(self, entries: Iterable[int], seconds: float) -> float:
        """Returns measured seconds divided by the modelled ones of the kernels among entries, which share them so.

        Without such kernels it is time of the host.
        """
        modelled = sum(self._modelled(index) for index in entries if type(self._trace.entries[index]) is Kernel)
        if modelled:
            return seconds / modelled
        self._flush()
        if seconds > 0:
            self._operations.append(Run(0, 0.0, seconds, seconds, ()))
        return 0.0

    def _modelled(self, index: int) -> float:
        """Returns the time of a kernel, with that of its launch, on the model of the device."""
        kernel = self._trace.kernel(index)
        return self._device.seconds(kernel) + kernel.launches * self._device.launch_seconds

    def kernel(self, index: int, kernel: Kernel, share: float | None = None) -> None:
        """Adds a kernel.

        Args:
            index: of the entry.
            kernel: the entry.
            share: measured time of kernels and their launches, divided by the modelled one. None: not measured.
        """
        # A run has one stream, and stands after the messages that were called before it.
        if kernel.stream != self._stream or self._batch:
            self._flush()
            self._stream = kernel.stream
        if share is None:
            seconds = self._device.seconds(kernel)
            self._host += kernel.launches * self._device.launch_seconds
        else:
            seconds = share * self._modelled(index)
        self._seconds[index] = seconds
        self._total += seconds
        # This kernel starts when the host arrives, or when the kernels before it end, at `least`, if that is later.
        self._least = max(self._least, self._host) + seconds
        self._run.append(index)

    def other(self, index: int, entry: object) -> None:
        # Only NCCL begins the messages of a batch together.
        if isinstance(entry, Message) and entry.batch >= 0 and not self._device.is_synchronous:
            if self._run or (self._batch and self._batch_of(self._batch[0]) != entry.batch):
                self._flush()
            self._batch.append(index)
            return
        self._flush()
        match entry:
            case Collective():
                self._post(("group", entry.group), (index,), entry.stream, entry.blocking)
            case Message():
                queue = ("peer", entry.peer) if entry.is_ordered else ("message", index)
                if self._device.is_synchronous and entry.is_ordered:
                    # Without NCCL the two directions of a link do not wait for each other.
                    queue = ("to" if entry.is_send else "from", entry.peer)
                self._post(queue, (index,), entry.stream, entry.blocking)
            case Copy():
                self._operations.append(Transfer(entry.stream, self._device.copy_seconds(entry), entry.to_gpu, index))
            case HostKernel():
                self._operations.append(HostRun(self._device.host_seconds(entry)))
            # Communication of an earlier step has long ended.
            case Wait() if entry.number in self._posted:
                self._operations.append(Await(entry.stream, -1, self._posted[entry.number], index))
            case RecordEvent():
                # Later waits mean this recording, as in CUDA.
                event = self._recorded[entry.event] = len(self._operations)
                self._operations.append(Mark(entry.stream, event))
            # CUDA: a wait for an event that has not been recorded does nothing.
            case WaitEvent() if entry.event in self._recorded:
                self._operations.append(Await(entry.stream, self._recorded[entry.event], -1, index))
            # CUDA: the host does not wait for an event that has not been recorded, either.
            case HostWait() if entry.event < 0 or entry.event in self._recorded:
                event = self._recorded[entry.event] if entry.event >= 0 else -1
                self._operations.append(HostAwait(entry.stream, event, index))

    def _post(self, queue: tuple[str, int], entries: tuple[int, ...], stream: int, blocking: bool) -> None:
        for index in entries:
            self._posted[self._trace.communication(index).number] = index
        self._operations.append(Post(stream, queue, entries, blocking))

    def _batch_of(self, index: int) -> int:
        entry = self._trace.entries[index]
        assert isinstance(entry, Message)
        return entry.batch

    def _flush(self) -> None:
        if self._run:
            run = Run(self._stream, self._total, self._least, self._host, tuple(self._run))
            self._operations.append(run)
            self._run, self._total, self._least, self._host = [], 0.0, 0.0, 0.0
        if self._batch:
            messages = [entry for index in self._batch if isinstance(entry := self._trace.entries[index], Message)]
            blocking = any(message.blocking for message in messages)
            is_ordered = any(message.is_ordered for message in messages)
            # NCCL makes one kernel of a batch, on the communicator of its group.
            queue = ("group", messages[0].group) if is_ordered else ("message", self._batch[0])
            self._post(queue, tuple(self._batch), messages[0].stream, blocking)
            self._batch = []

    def program(self) -> Program:
        self._flush()
        return Program(self._trace, tuple(self._operations), self._seconds)
