"""What torch gets for a collective under way: a `torch.distributed.Work` around Echelon's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, NoReturn, TypeVar

from torch import Tensor
from torch.distributed import Work as TorchWork
from torch.futures import Future, collect_all

from echelon._torch_private import fail_when_unwrapped
from echelon.backends.work import Work
from echelon.errors import UnsupportedOp

# The futures of operations, as torch.distributed hands them out.
#
# Strategy. A future of torch is waited for in C++, where nobody drives anything, so a thread has to complete it: that
# of the lane in which its operation ran, right behind it and with no lock held. The callbacks of the future run there
# too. They may begin operations and wait for them, or for the futures of those, which are queued in the lane behind
# them: so waiting for an `Outcome` means to wait for the lane, whose thread then runs what is queued.
#
# A future that fails has to fail for torch's C++ as well, to which an exception that was set from Python is a value
# like any other. It takes tensors out of a value by pickling it: so what stands for the error raises it when it is
# pickled.

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


_SMALL_BYTES = 4096
UNSET = timedelta(0)
"""What torch passes for "no timeout"."""


def seconds(timeout: timedelta) -> float | None:
    """Returns a timeout of torch in seconds, None for one that was not given, which torch writes as 0 or -1 ms."""
    return timeout.total_seconds() if timeout > UNSET else None


class Done(TorchWork):
    """An operation that has ended well."""

    def __init__(self, results: Sequence[Tensor]) -> None:
        super().__init__()
        self._results = list(results)

    def wait(self, timeout: timedelta = UNSET) -> bool:  # noqa: ARG002, D102
        return True

    def is_completed(self) -> bool:  # noqa: D102
        return True

    def is_success(self) -> bool:  # noqa: D102
        return True

    def exception(self) -> BaseException | None:  # noqa: D102
        return None

    def result(self) -> list[Tensor]:  # noqa: D102
        return self._results

    def synchronize(self) -> None:  # noqa: D102
        return

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a future that has its value."""
        return finished(self._results)


class Orphans:
    """Operations that Python has dropped before anybody waited for them.

    C++ may hold the half of a Work that is C++, as DDP's `join` does, and that half alone does not know when the
    operation ends: whoever waits for it would wait for ever. Whether C++ holds it cannot be asked. So the last ones are
    kept, and of those that have ended well only tensors that are small, such as the number that `join` asks for.
    """

    def __init__(self) -> None:
        """Keeps none yet."""
        self._kept: deque[Pending] = deque(maxlen=4096)
        self._under_way: list[Pending] = []

    def keep(self, work: Pending) -> None:
        """Keeps the Python half of an operation."""
        self._kept.append(work)
        self._under_way = [each for each in (*self._under_way, work) if not each.let_go()]


class Pending(TorchWork):
    """An operation under way."""

    def __init__(self, work: Work[list[Tensor]], outcome: Outcome[list[Tensor]], orphans: Orphans) -> None:
        """Takes over an operation whose result is its tensors, and the future of it."""
        super().__init__()
        self._work = work
        self._outcome = outcome
        self._orphans = orphans
        self._is_wanted = True
        self._has_let_go = False

    def __del__(self) -> None:
        """Lives on if nobody has waited for the operation."""
        if self._is_wanted:
            self._orphans.keep(self)

    def let_go(self) -> bool:
        """Drops large tensors of an operation that has ended well; says whether it has ended."""
        if not (self._work.is_completed() and self._outcome.done()):
            return False
        if self._work.exception() is None and sum(tensor.nbytes for tensor in self._work.result()) > _SMALL_BYTES:
            del self._work, self._outcome
            self._has_let_go = True
        return True

    def wait(self, timeout: timedelta = UNSET) -> bool:
        """Returns when the operation has ended, and its future has its value, for which C++ asks next.

        Raises:
            Timeout: not within `timeout`; the operation goes on.
            EchelonError: it failed.
        """
        if not self._has_let_go:
            limit = seconds(timeout)
            self._work.wait(FOREVER if limit is None else limit)
            self._outcome.wait()
        self._is_wanted = False
        return True

    def is_completed(self) -> bool:  # noqa: D102
        return self._work.is_completed()

    def is_success(self) -> bool:  # noqa: D102
        return self._work.is_completed() and self._work.exception() is None

    def exception(self) -> BaseException | None:  # noqa: D102
        return self._work.exception()

    def result(self) -> list[Tensor]:  # noqa: D102
        return self._work.result()

    def synchronize(self) -> None:  # noqa: D102
        self.wait()

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a future of the tensors.

        Raises:
            UnsupportedOp: nobody in Python held the operation when it ended, and its tensors were large.
        """
        if self._has_let_go:
            raise UnsupportedOp("the tensors of an operation that was dropped are gone: keep the Work, or its future")
        self._is_wanted = False
        return self._outcome


class Coalesced(TorchWork):
    """Several operations that are waited for together."""

    def __init__(self, works: Sequence[TorchWork]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta = UNSET) -> bool:
        """Returns when all have ended; `timeout` counts for each."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:  # noqa: D102
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:  # noqa: D102
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:  # noqa: D102
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def result(self) -> list[Tensor]:  # noqa: D102
        return [tensor for work in self._works for tensor in work.result()]

    def synchronize(self) -> None:  # noqa: D102
        self.wait()

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a future of the tensors of all."""
        futures = collect_all([work.get_future() for work in self._works])
        return futures.then(lambda all: [tensor for future in all.value() for tensor in future.value()])
