"""The futures of operations, as torch.distributed hands them out.

Strategy. A future of torch is waited for in C++, where nobody drives anything, so a thread has to complete it: that of
the lane in which its operation ran, right behind it and with no lock held. The callbacks of the future run there too.
They may begin operations and wait for them, or for the futures of those, which are queued in the lane behind them: so
waiting for an `Outcome` means to wait for the lane, whose thread then runs what is queued.

A future that fails has to fail for torch's C++ as well, to which an exception that was set from Python is a value like
any other. It takes tensors out of a value by pickling it: so what stands for the error raises it when it is pickled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

from torch.futures import Future

from echelon._torch_private import fail_when_unwrapped
from echelon.backends.work import Work

T = TypeVar("T")
S = TypeVar("S")

FOREVER = threading.TIMEOUT_MAX
"""Seconds. For what ends by itself when its own time is up."""


class Outcome(Future[T], Generic[T]):
    """A future that a job in a lane completes."""

    def __init__(self) -> None:
        """Makes a future; `is_driven_by` has to be called before anybody waits for it."""
        super().__init__()
        self._job: Work[None] | None = None

    def is_driven_by(self, job: Work[None]) -> None:
        """Says which job of a lane completes this future."""
        self._job = job

    def wait(self) -> T:
        """Returns the value, once it is there; raises the error of the operation."""
        if self._job is not None and not self.done():
            self._job.wait(FOREVER)
        return super().wait()

    def then(self, callback: Callable[[Future[T]], S]) -> Outcome[S]:
        """Returns a future of what `callback` makes of this one, once this one is done."""
        after: Outcome[S] = Outcome()
        after._job = self._job
        super().then(lambda future: after.settle(lambda: callback(future)))
        return after

    def settle(self, function: Callable[[], T]) -> None:
        """Completes this future with what a function returns or raises."""
        try:
            value = function()
        except Exception as error:
            fail_when_unwrapped(self, error)
            self.set_result(_Failure(error))  # type: ignore[arg-type]
        else:
            self.set_result(value)


class _Failure:
    """The value of a future that has failed."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> NoReturn:
        raise self._error


def finished(value: T) -> Future[T]:
    """Returns a future that has its value."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future
