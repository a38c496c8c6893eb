"""Work: handle of an operation in flight, returned by `isend`, `irecv` and asynchronous collectives."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch.autograd.graph import increment_version

from echelon.arguments import check_seconds, no_attribute
from echelon.backends.admission import check_mode
from echelon.backends.memory import describe
from echelon.call_site import is_in_ddp, outwards
from echelon.errors import Timeout, without_frames
from echelon.operation_records import OperationRecord
from echelon.purposes import OF_STEPS

T = TypeVar("T")

DEFAULT_TIMEOUT = 600.0
"""Seconds that a blocking call waits unless told otherwise."""


class Message(NamedTuple):
    """A message that was received at once."""

    tensor: torch.Tensor
    note: str
    what: str = ""
    """Dtype and shape of the tensor. Empty if that text was not made yet."""


class Received(NamedTuple):
    """Result of a receive from any rank.

    Args:
        tensor: the tensor that came.
        src: the sending rank.
        tag: the tag of the message.
    """

    tensor: torch.Tensor
    src: int
    """The sending rank."""
    tag: int
    """The tag of the message."""


_POLL_SECONDS = 0.1
"""A shorter wait is a look whether the operation has ended, again and again maybe: no rank is asked."""


class Lateness(Protocol):
    """Knowledge about an operation that does not end in time."""

    def ends_within(self, work: Work[Any], seconds: float) -> bool:
        """As the method of the Work; may raise an error if the operation can never end."""
        ...

    def patience(self) -> float:
        """Returns for how many seconds more the operation is worth waiting for: it is about to fail by itself."""
        ...

    def describe_peers(self, seconds: float) -> Timeout:
        """Asks the other ranks where they are, for some seconds at most; returns an error that says so."""
        ...

    def is_of(self, flight: OperationRecord) -> bool:
        """Whether the operation is that of a record."""
        ...


class Driver(Protocol):
    """Driver of a Work: makes it progress while a thread waits on it."""

    def drive(self, work: Work[object], timeout: float | None) -> bool:
        """Blocks until `work` is completed. False if `timeout` seconds (None: for ever) pass first."""
        ...


_MEANT = {
    **dict.fromkeys(("done", "test", "Test", "is_done", "poll"), "is_completed"),
    **dict.fromkeys(("Wait", "join", "synchronize", "get"), "wait"),
}
"""Names that other libraries give to attributes of a handle."""


class Work(Generic[T]):
    """Handle of one operation in flight. Completed once, by the backend, with a result or an error."""

    __slots__ = (
        "_callbacks",
        "_driver",
        "_error",
        "_overwritten",
        "_result",
        "_timeout",
        "_when_seen",
        "_when_taken",
        "description",
        "flight",
        "has_ended",
        "lateness",
        "note",
    )

    def __init__(self, driver: Driver, description: object, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Begins an operation.

        Args:
            driver: makes progress while a thread waits. A backend's messages are one.
            description: the operation, as errors name it.
            timeout: seconds of a `wait` that gives none.
        """
        self.description = description
        """The operation, as text or as an object with a `str`."""
        self.note = ""
        """Of a receive that is done: the note that came with the message."""
        self._driver = driver
        self._timeout = timeout
        self.has_ended = False
        """Whether the operation has ended. Unlike `is_completed` of a simulated rank, this lets nothing happen."""
        self._result: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._overwritten: Sequence[torch.Tensor] = ()
        self.flight: OperationRecord | None = None
        """The operation's entry in the flight recorder."""
        self.lateness: Lateness | None = None
        """Diagnoses a wait that ends in a Timeout; None: the error names only the time."""
        self._when_seen: Callable[[], object] = _nothing
        self._when_taken: Callable[[], object] | None = None

    if not TYPE_CHECKING:  # type checkers report the name themselves

        def __getattr__(self, name: str) -> NoReturn:
            of_result = (
                {name: f" wait() returns the tensor: write work.wait().{name}"} if hasattr(torch.Tensor, name) else {}
            )
            raise no_attribute("a Work", name, dir(type(self)), of_result | _MEANT)

    def is_completed(self) -> bool:
        """Returns whether the operation has ended, with a result or an error. Never blocks."""
        return self.has_ended

    def wait(self, timeout: float | None = None) -> T:
        """Blocks until the operation ends and returns its result.

        Args:
            timeout: seconds; None means the default of the group or backend that made this Work.

        Raises:
            Timeout: it did not end in time. The operation goes on; wait again if you like. After 0.1 s or more it says
                where the other ranks are; to ask them takes at most as long again, and 2 s.
            DeadlockError: no `timeout` was given, and ranks wait for each other's messages.
            UnsupportedOp: it is still under way, and FakeTensorMode or a transform of torch.func is active: messages
                that arrive during the wait would have no memory. It goes on; wait again outside.
            EchelonError: the operation failed.
        """
        seconds = self._timeout if timeout is None else check_seconds(timeout)
        # With a timeout of its own a program may go on after it, so no wait of it is a deadlock.
        lateness = None if timeout is not None else self.lateness
        if not self.has_ended and not (lateness.ends_within(self, seconds) if lateness else self.ends_within(seconds)):
            self._await_last_words(seconds)
        return self.result()

    def ends_within(self, seconds: float) -> bool:
        """Blocks until the operation ends. False if `seconds` pass first.

        Raises:
            UnsupportedOp: as `wait`.
        """
        if self.has_ended:
            return True
        check_mode(f"wait for {self.flight or self.description}")
        return self._driver.drive(self, seconds)  # type: ignore[arg-type]

    def _await_last_words(self, seconds: float) -> None:
        """Returns if the operation has ended meanwhile; else raises a Timeout that says as much as can be known."""
        late = f"{self.description}: not done after {seconds:.1f} s"
        if self.lateness is None or seconds < _POLL_SECONDS:
            raise Timeout(late)
        # An operation whose own time is up asks the others and fails with what it hears: better than asking twice.
        patience = self.lateness.patience()
        if patience > 0 and self.ends_within(patience):
            return
        error = self.lateness.describe_peers(seconds)
        if not self.has_ended:
            raise Timeout(f"{late}: {error}", error.ranks)

    def result(self) -> T:
        """Returns the result of a completed operation.

        Raises:
            Timeout: it is still under way.
            EchelonError: the operation failed.
        """
        if not self.has_ended:
            raise Timeout(f"{self.description}: still under way; call wait() first")
        if self._error is not None:
            self._when_seen()
            raise without_frames(self._error)
        if self._when_taken is not None:
            self._when_taken()
        return self._result  # type: ignore[return-value]

    def exception(self) -> BaseException | None:
        """Returns the error of a completed operation, None if it succeeded or is still under way."""
        if self._error is not None:
            self._when_seen()
        return self._error

    def complete(self, result: T | None = None, error: BaseException | None = None) -> None:
        """Ends the operation; for backends. A second call does nothing: the first cause wins."""
        if self.has_ended:
            return
        self._result, self._error, self.has_ended = result, error, True
        if self.flight is not None:
            end_with(self.flight, result, error)
        if self._overwritten:
            self._tell_autograd()
        for callback in self._callbacks:
            callback()
        self._callbacks.clear()

    def on_completion(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when the operation ends; for backends, which call this and `complete` under one lock."""
        if self.has_ended:
            callback()
        else:
            self._callbacks.append(callback)

    def when_seen(self, callback: Callable[[], object]) -> None:
        """Calls `callback` when somebody learns of the operation's error."""
        self._when_seen = callback

    def when_taken(self, callback: Callable[[], object]) -> None:
        """Calls `callback` when a thread takes the operation's result, in that thread."""
        self._when_taken = callback

    def record(self, flight: OperationRecord) -> None:
        """Has the end of the operation written down in the flight recorder."""
        self.flight = flight
        if self.has_ended:
            end_with(flight, self._result, self._error)

    def uses(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes the tensors of the operation, which must not change before it begins. Simulated ranks check that."""

    def overwrites(self, tensors: Sequence[torch.Tensor]) -> None:
        """Counts these tensors as overwritten for autograd at the end of the operation.

        They were counted when it began as well, but a graph may have saved a tensor since.
        """
        self._overwritten = tensors
        if self.has_ended:
            self._tell_autograd()

    def _tell_autograd(self) -> None:
        increment_version(self._overwritten)
        self._overwritten = ()

    def __repr__(self) -> str:
        state = "under way" if not self.has_ended else "failed" if self._error else "done"
        return f"<Work {self.description}: {state}>"


_ASLEEP_SECONDS = 1.5
"""Seconds without any processor time after which a thread in the C++ of torch's DDP waits for its collectives."""
_seen_in_ddp: dict[int, tuple[float, float]] = {}
"""By thread: its processor time when it was seen there, and since when it has stayed at that."""


def is_waited_for(flight: OperationRecord) -> bool:
    """Whether the thread that began an operation waits for its Work.

    The C++ of torch's DDP waits without a frame of Python: for buffers in a forward, and for gradients at the end of a
    backward. Such a wait is known from the second look on. Other operations may go on beside a backward that sleeps, as
    while a GPU computes: nothing of torch waits for these.
    """
    if flight.purpose is not None and flight.purpose.call in OF_STEPS and is_in_ddp(flight.thread):
        return _sleeps(flight.thread)
    for frame in outwards(sys._current_frames().get(flight.thread)):
        if frame.f_code is Work.wait.__code__:
            work = frame.f_locals["self"]
            if work.flight is flight or (work.lateness is not None and work.lateness.is_of(flight)):
                return True
    return False


def _sleeps(thread: int) -> bool:
    """Whether a thread has used no processor time since another look, some time ago."""
    used, now = time.clock_gettime(time.pthread_getcpuclockid(thread)), time.monotonic()
    before, since = _seen_in_ddp.get(thread, (-1.0, now))
    if used != before:
        _seen_in_ddp[thread] = used, now
        return False
    return now - since >= _ASLEEP_SECONDS


def end_with(flight: OperationRecord, result: object, error: BaseException | None = None) -> None:
    """Records the end of an operation; for a receive also the message's shape, dtype and size."""
    tensor = result.tensor if isinstance(result, Received) else result
    if isinstance(tensor, torch.Tensor):
        flight.got(describe(tensor.shape, tensor.dtype), tensor.nbytes)
    flight.end(error)


def _nothing() -> None: ...
