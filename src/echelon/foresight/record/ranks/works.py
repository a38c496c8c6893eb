"""Works and futures of recorded communication, which has no values and is complete at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch import Tensor
from torch.futures import Future

from echelon._torch_private.autograd import at_end_of_backward, is_in_backward
from echelon.foresight.record.log.log import Log
from echelon.foresight.trace import RecordEvent, Wait, WaitEvent
from echelon.interop.works import UNSET, EchelonWork

S = TypeVar("S")


class RecordedWork(EchelonWork):
    """Work of a collective or a message. A wait for it is an entry of the log."""

    def __init__(
        self,
        log: Log,
        number: int,
        tensors: Sequence[Tensor],
        is_waited_for: bool,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """Makes a Work that is complete.

        Args:
            log: log of the rank.
            number: number of the entry. -1: it has none, as for real values.
            tensors: its results.
            is_waited_for: whether the caller has waited already.
            settle: is called by the first wait, for instance to receive a value.
        """
        super().__init__()
        self._log = log
        self._settle = settle
        self._number = number
        self._tensors = list(tensors)
        self._is_waited_for = False
        # A Work may be kept for a long time, and must not keep memory.
        self._after = [weakref.ref(tensor) for tensor in tensors]
        if is_waited_for:
            self._waited()

    def _waited(self) -> None:
        self._is_waited_for = True
        # DDP's reducer asks for the number of ranks that have joined after its wait.
        if any(each.numel() > 1 for each in self._tensors):
            self._tensors = []

    def wait(self, timeout: timedelta = UNSET) -> bool:  # noqa: ARG002
        """Makes the current stream wait, as NCCL's Work does. The host goes on."""
        if not self._is_waited_for:
            with self._log.call("wait"):
                if self._number >= 0:
                    self._log.entries.append(Wait(self._log.stream, self._number, self._log.place()))
                self._waited()
                if self._settle is not None:
                    self._settle()
        return True

    def block_current_stream(self) -> None:  # noqa: D102
        self.wait()

    def is_completed(self) -> bool:  # noqa: D102
        return True

    def exception(self) -> BaseException | None:  # noqa: D102
        return None

    def result(self) -> list[Tensor]:  # noqa: D102
        return self._tensors or [tensor for each in self._after if (tensor := each()) is not None]

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a future of the tensors. Within a backward, the stream waits for it at the end of the backward."""
        future: RecordedFuture[Any] = RecordedFuture(self._log, self._number)
        future.set_result(self.result())
        # DDP's reducer waits in C++ for the futures of its buckets, which calls nothing here.
        if is_in_backward() and not self._is_waited_for:
            at_end_of_backward(future.join, lambda: None)
        self._waited()
        return future

    def _source_rank(self) -> int:
        return -1


class RecordedFuture(Future[S]):
    """Completed future of communication. Callbacks run on a stream of their own, which waits for it."""

    def __init__(self, log: Log, number: int) -> None:
        super().__init__()
        self._log = log
        self._number = number
        self._ends: list[int] = []
        """Events at the ends of callbacks."""

    def join(self) -> None:
        """Makes the current stream wait for the communication and its callbacks."""
        log = self._log
        with log.call("wait for a future"):
            # Callbacks have waited for the communication, so their ends come later.
            if self._ends:
                log.entries.extend(WaitEvent(log.stream, event) for event in self._ends)
            elif self._number >= 0:
                log.entries.append(Wait(log.stream, self._number, log.place()))

    def wait(self) -> S:
        """Makes the current stream wait. Returns the value."""
        self.join()
        return super().wait()

    def then(self, callback: Callable[[Future[S]], Any]) -> Future[Any]:
        """Runs a callback on a stream of its own, and returns the future of its result."""
        log, ends = self._log, self._ends
        after: RecordedFuture[Any] = RecordedFuture(log, self._number)
        after._ends = ends
        outer, log.stream = log.stream, log.new_stream()
        try:
            if self._number < 0:
                after.set_result(callback(self))
                return after
            log.entries.append(Wait(log.stream, self._number, log.place()))
            after.set_result(callback(self))
            ends.append(log.new_event())
            log.entries.append(RecordEvent(log.stream, ends[-1]))
        finally:
            log.stream = outer
        return after
