"""Asynchronous operations of a recorded rank: each runs when it is started, on a stream of its group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from echelon.backends.host_copies import StreamScope
from echelon.backends.work import Work
from echelon.foresight.record.log import Log
from echelon.foresight.trace import RecordEvent, WaitEvent
from echelon.simulation.backend import VirtualLanes, VirtualWork

T = TypeVar("T")


class RecordedScope(StreamScope):
    """Place of one asynchronous operation among the streams of a recorded rank."""

    def __init__(self, log: Log, stream: int) -> None:
        """Takes the log of the rank, and the stream of the operation's group."""
        self._log = log
        self._stream = stream
        self._ended = 0

    def queued(self, function: Callable[[], T]) -> T:  # noqa: D102
        log, first = self._log, len(self._log.entries)
        outer, log.stream = log.stream, self._stream
        try:
            result = function()
        finally:
            log.stream = outer
        # An operation on values of the host leaves no entries, and needs no streams.
        if len(log.entries) > first:
            begun, self._ended = log.new_event(), log.new_event()
            log.entries[first:first] = [RecordEvent(outer, begun), WaitEvent(self._stream, begun)]
            log.entries.append(RecordEvent(self._stream, self._ended))
        return result

    def join(self) -> None:  # noqa: D102
        if self._ended:
            self._log.entries.append(WaitEvent(self._log.stream, self._ended))
            self._ended = 0


class LanesAtOnce(VirtualLanes):
    """Lanes whose operations run in the thread that starts them, since only that thread records its rank."""

    def start(self, function: Callable[[], T], description: str, lane: int = 0) -> Work[T]:  # noqa: ARG002, D102
        work: VirtualWork[T] = self.wait_of(description)  # type: ignore[assignment]
        try:
            work.complete(function())
        except Exception as error:
            work.complete(error=error)
        return work
