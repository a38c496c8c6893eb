"""Streams and events of a device that only write into the log of the calling rank."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from echelon.foresight.record.here import recording_here
from echelon.foresight.record.log.log import Log
from echelon.foresight.trace import HostWait, RecordEvent, WaitEvent


class Stream:
    """Stream of the device, by its number. 0 is the default stream."""

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None, **_: object) -> None:
        """Makes a new stream, or the stream with a number."""
        log = _log()
        self.stream_id = (0 if log is None else log.new_stream()) if number is None else number
        self.priority = priority
        self.device = _gpu() if device is None or isinstance(device, int) else torch.device(device)
        self.device_index = self.device.index or 0
        # DeviceType::CUDA of torch's C++.
        self.device_type = 1
        self.cuda_stream = self.stream_id
        self._outer: list[int] = []

    def wait_event(self, event: Event) -> None:
        """Makes the stream wait for an event, if it has been recorded."""
        if (log := _log()) is not None and event.number:
            log.entries.append(WaitEvent(self.stream_id, event.number))

    def wait_stream(self, stream: Stream) -> None:
        """Makes the stream wait for all work of another stream so far."""
        if stream.stream_id != self.stream_id:
            self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Records an event and returns it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Makes the host wait for the stream."""
        if (log := _log()) is not None:
            log.entries.append(HostWait(self.stream_id, -1, log.place()))

    def query(self) -> bool:
        """Whether the stream has nothing to do: always."""
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Returns the lowest and the highest priority, which has the lowest number."""
        return 0, -5

    def is_capturing(self) -> bool:
        """Whether the stream is captured into a graph: never."""
        return False

    def __enter__(self) -> Stream:
        if (log := _log()) is not None:
            self._outer.append(log.stream)
            log.stream = self.stream_id
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if (log := _log()) is not None:
            log.stream = self._outer.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)


class Event:
    """Event of the device."""

    def __init__(self, *_: object, **__: object) -> None:
        self.number = 0
        """Number of the last record. 0 before the first."""

    def record(self, stream: Stream | None = None) -> Event:
        """Records the event on a stream. None: on the current one."""
        if (log := _log()) is not None:
            self.number = log.new_event()
            log.entries.append(RecordEvent(log.stream if stream is None else stream.stream_id, self.number))
        return self

    def wait(self, stream: Stream | None = None) -> None:
        """Makes a stream wait for the event. None: the current one."""
        (current_stream() if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        """Makes the host wait for the event."""
        if (log := _log()) is not None and self.number:
            log.entries.append(HostWait(-1, self.number, log.place()))

    def query(self) -> bool:
        """Whether the event has happened: always."""
        return True

    def elapsed_time(self, end_event: Event) -> float:  # noqa: ARG002
        """Returns milliseconds between two events: 1, which is noted as an assumption."""
        if (log := _log()) is not None:
            log.assume("the time between two events is 1 ms")
        return 1.0


class InStream:
    """Context in which a stream is current, as `torch.cuda.stream`. None: no change."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._stream is not None:
            self._stream.__exit__(*error)


def current_stream(device: object = None) -> Stream:  # noqa: ARG001
    """Returns the stream that is current in the calling rank."""
    log = _log()
    return Stream(number=0 if log is None else log.stream)


def default_stream(device: object = None) -> Stream:  # noqa: ARG001
    """Returns the default stream."""
    return Stream(number=0)


def set_stream(stream: Stream) -> None:
    """Makes a stream current."""
    if (log := _log()) is not None:
        log.stream = stream.stream_id


def synchronize(device: object = None) -> None:  # noqa: ARG001
    """Makes the host wait for the whole device."""
    if (log := _log()) is not None:
        log.entries.append(HostWait(-1, -1, log.place()))


def _gpu() -> torch.device:
    """Returns the rank's GPU."""
    recording = recording_here()
    return torch.device("cuda", 0) if recording is None or recording.placement is None else recording.placement.gpu


def _log() -> Log | None:
    recording = recording_here()
    return None if recording is None else recording.log
