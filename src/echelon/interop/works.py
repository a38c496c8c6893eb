"""torch's Work and Future for Echelon's collectives, and the runner that makes them.

Strategy. A synchronous collective runs in the calling thread. An asynchronous one runs in the group's lane, a thread
with a queue. torch waits for a future in C++, which drives nothing, so a thread has to complete it: the lane's, right
after the operation and with no lock held. The future's callbacks run there too. They may start operations and wait for
them, or for their futures, which are queued in the lane behind the callback. So waiting for an `Outcome` means waiting
for the lane, whose thread then runs the queued jobs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Generic, NoReturn, Protocol, TypeVar, cast

from torch import Tensor
from torch.distributed import Work as TorchWork
from torch.futures import Future, collect_all

from echelon._torch_private.autograd import at_end_of_backward, is_at_end_of_backward, is_in_backward
from echelon._torch_private.distributed import fail_when_unwrapped, is_done
from echelon._torch_private.modules import never_compiled
from echelon.backends.work import Work
from echelon.call_site import ddp_call
from echelon.errors import UnsupportedOp, without_frames
from echelon.group.group import ProcessGroup

T = TypeVar("T")
S = TypeVar("S")

FOREVER = threading.TIMEOUT_MAX
"""Seconds. Timeout of waits for operations that end by their own timeout."""


class Outcome(Future[T], Generic[T]):
    """Future that a job in a lane completes."""

    def __init__(self) -> None:
        """Makes an unfinished future. Call `is_driven_by` before any wait for it."""
        super().__init__()
        self._job: Work[None] | None = None
        self.is_watched = False
        """Whether the program has this future, or has asked for the end of its operation."""

    def is_driven_by(self, job: Work[None]) -> None:
        """Sets the lane's job that completes this future."""
        self._job = job

    @never_compiled
    def wait(self) -> T:
        """Blocks until the future is done. Returns its value, or raises the error of the operation."""
        # Waiting for the job lets this thread run the lane's queue if it is the lane's thread.
        if self._job is not None and not is_done(self):
            self._job.wait(FOREVER)
        return super().wait()

    def then(self, callback: Callable[[Future[T]], S]) -> Outcome[S]:
        """Returns a future of the callback's result. The callback gets this future when it is done."""
        after: Outcome[S] = Outcome()
        after._job = self._job
        super().then(lambda future: after.settle(lambda: callback(future)))
        return after

    def settle(self, function: Callable[[], T]) -> None:
        """Completes this future with a function's result or exception."""
        try:
            value = function()
        except Exception as error:
            # torch's C++ treats an exception that Python sets like any other value. It finds a value's tensors by
            # pickling it, so this value raises the error when pickled.
            fail_when_unwrapped(self, error)
            self.set_result(_Failure(error))  # type: ignore[arg-type]
        else:
            self.set_result(value)


class _Failure:
    """Value of a failed future, which raises the error when torch's C++ pickles it, or tells that it is no tensor."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> NoReturn:
        raise self._error

    # DDP takes the result of a hook's future for a tensor. Its complaint about the value's type would hide the error.
    def __str__(self) -> NoReturn:
        raise self._error


# Results up to this size stay with an orphaned Work. DDP's `join` waits for one number.
_SMALL_BYTES = 4096
UNSET = timedelta(0)
"""torch's value for "no timeout"."""


def seconds(timeout: timedelta) -> float | None:
    """Returns torch's timeout in seconds. None if it is unset, for which torch passes 0 or -1 ms."""
    return timeout.total_seconds() if timeout > UNSET else None


class EchelonWork(TorchWork):
    """Base of Works: methods of torch's interface that follow from its others."""

    def is_success(self) -> bool:  # noqa: D102
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:  # noqa: D102
        self.wait()


class Done(EchelonWork):
    """Work of an operation that has succeeded."""

    def __init__(self, results: Sequence[Tensor]) -> None:
        super().__init__()
        self._results = list(results)

    def wait(self, timeout: timedelta = UNSET) -> bool:  # noqa: ARG002, D102
        return True

    def is_completed(self) -> bool:  # noqa: D102
        return True

    def exception(self) -> BaseException | None:  # noqa: D102
        return None

    def result(self) -> list[Tensor]:  # noqa: D102
        return self._results

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a completed future of the tensors."""
        future: Future[Any] = Future()
        future.set_result(self._results)
        return future


class Orphans:
    """Operations whose Python Work was dropped before any wait for it.

    C++ may still hold the C++ half of a Work, as DDP's `join` does. That half alone never learns that the operation has
    ended, so a wait for it would hang. Python cannot ask whether C++ holds it. So the last 4096 are kept; succeeded
    ones keep their tensors only up to 4096 bytes, such as the number that `join` asks for.
    """

    def __init__(self) -> None:
        self._kept: deque[Pending] = deque(maxlen=4096)
        self._under_way: deque[Pending] = deque()

    def keep(self, work: Pending) -> None:
        """Keeps the Python half of an operation."""
        self._kept.append(work)
        self._under_way.append(work)
        # One by one: destructors run in any thread, and one may call this in the middle of another call.
        for _ in range(len(self._under_way)):
            with suppress(IndexError):
                oldest = self._under_way.popleft()
                if not oldest.let_go():
                    self._under_way.append(oldest)


class Pending(EchelonWork):
    """Work of an operation in flight."""

    def __init__(self, work: Work[list[Tensor]], outcome: Outcome[list[Tensor]], orphans: Orphans) -> None:
        """Wraps an operation, whose result is its tensors, and its future."""
        super().__init__()
        # None once the tensors are let go. One attribute, because another thread may do so in the middle of a wait.
        self._running: tuple[Work[list[Tensor]], Outcome[list[Tensor]]] | None = (work, outcome)
        self._orphans = orphans
        self._is_wanted = True

    def __del__(self) -> None:
        """Moves to the orphans if no wait for the operation has returned."""
        # C++ may hold the other half and wait for it later: see `Orphans`.
        if self._is_wanted:
            self._orphans.keep(self)

    def let_go(self) -> bool:
        """Drops large tensors of an operation that has succeeded. True if the operation has ended."""
        if self._running is None:
            return True
        work, outcome = self._running
        # Not `is_completed`, which lets other simulated ranks go on: this also runs in a destructor.
        if not (work.has_ended and is_done(outcome)):
            return False
        if work.exception() is None and sum(tensor.nbytes for tensor in work.result()) > _SMALL_BYTES:
            self._running = None
        return True

    @never_compiled
    def wait(self, timeout: timedelta = UNSET) -> bool:
        """Blocks until the operation has ended and its future is complete.

        Raises:
            Timeout: not within `timeout`; the operation goes on.
            EchelonError: the operation failed.
        """
        if (running := self._running) is not None:
            work, outcome = running
            outcome.is_watched = True
            limit = seconds(timeout)
            work.wait(FOREVER if limit is None else limit)
            outcome.wait()  # C++ asks for the future's value next
        self._is_wanted = False
        return True

    def is_completed(self) -> bool:  # noqa: D102
        return (running := self._running) is None or running[0].is_completed()

    def exception(self) -> BaseException | None:  # noqa: D102
        if (running := self._running) is None:
            return None
        work, outcome = running
        outcome.is_watched |= work.has_ended
        return work.exception()

    def result(self) -> list[Tensor]:
        """Returns the tensors; see `get_future`."""
        work, outcome = self._held()
        outcome.is_watched = True
        return work.result()

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a future of the tensors.

        Raises:
            UnsupportedOp: Python had dropped the operation before it ended, and its tensors were large.
        """
        outcome = self._held()[1]
        outcome.is_watched = True
        self._is_wanted = False
        return outcome

    def _held(self) -> tuple[Work[list[Tensor]], Outcome[list[Tensor]]]:
        if (running := self._running) is None:
            raise UnsupportedOp("the tensors of a dropped operation were freed: keep the Work, or its future")
        return running


class Coalesced(EchelonWork):
    """Work of several coalesced operations."""

    def __init__(self, works: Sequence[TorchWork]) -> None:
        super().__init__()
        self._works = list(works)

    @never_compiled
    def wait(self, timeout: timedelta = UNSET) -> bool:
        """Blocks until all operations have ended. `timeout` applies to each."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:  # noqa: D102
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:  # noqa: D102
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def result(self) -> list[Tensor]:  # noqa: D102
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a future of the tensors of all operations."""
        futures = collect_all([work.get_future() for work in self._works])
        return futures.then(lambda all: [tensor for future in all.value() for tensor in future.value()])


def _finish_before_end_of_backward(job: Work[None]) -> None:
    """Waits for the job that completes a future of a backward at the end of it, before torch's own callbacks wait.

    DDP's C++ waits for the futures of its buckets in such a callback. A simulated rank that blocks there would keep its
    turn for ever. DDP adds its callback after it has started its last bucket, so this one comes first.
    """

    def finish() -> None:
        with suppress(Exception):  # raised again where the program, or DDP, asks for the result
            job.wait(FOREVER)  # not for the future, which is done before its callbacks are

    at_end_of_backward(finish, lambda: None)


class Options(Protocol):
    """Options common to all of torch's collectives."""

    timeout: timedelta
    asyncOp: bool  # noqa: N815


class Runner:
    """Runner of the collectives of one group for torch."""

    def __init__(self, group: ProcessGroup) -> None:
        """Wraps Echelon's group."""
        self.group = group
        self._thread = threading.local()
        self._orphans = Orphans()
        self._adding = threading.Lock()
        self._jobs: deque[Work[None]] = deque()
        """Ends of operations in the lane. Those that are done leave when another operation begins."""
        self._failed: tuple[Outcome[list[Tensor]], BaseException] | None = None
        """First operation that failed and whose end the program had not asked for. Later ones fail because of it."""

    def run(
        self,
        call: Callable[..., T | Work[T]],
        settle: Callable[[T], Sequence[Tensor]],
        options: Options | None,
        *,
        is_behind_all: bool = False,
    ) -> TorchWork:
        """Runs a collective. Blocks until it has ended, unless `options.asyncOp` is set.

        Args:
            call: starts it, given `async_op` and `timeout`.
            settle: writes its result into the user's tensors and returns them; called once.
            options: torch's options. None: their defaults.
            is_behind_all: whether it ends after all operations that this rank has started before.
        """
        if made_by := ddp_call():
            with self.group.backend.flight_recorder.within(made_by):
                return self._run(call, settle, options, is_behind_all)
        return self._run(call, settle, options, is_behind_all)

    def finish(self, timeout: float = FOREVER) -> None:
        """Blocks until all asynchronous operations have ended, and callbacks of their futures. Not in such a callback.

        Args:
            timeout: seconds for each. After one that is late, no other is waited for.

        Raises:
            EchelonError: an operation failed, and the program has never asked for its end.
        """
        while not self._is_settling() and (left := self._under_way()):
            with suppress(Exception):  # one that the program does not know is raised below
                left[0].wait(timeout)
            if not left[0].has_ended:
                break
        failed, self._failed = self._failed, None
        if failed is not None and not failed[0].is_watched:
            raise failed[1]

    def _run(
        self,
        call: Callable[..., T | Work[T]],
        settle: Callable[[T], Sequence[Tensor]],
        options: Options | None,
        is_behind_all: bool,
    ) -> TorchWork:
        # torch's options are asynchronous by default.
        timeout, is_async = (None, True) if options is None else (seconds(options.timeout), options.asyncOp)
        must_wait = is_async and not self.group.backend.lanes.progress_by_themselves
        # DDP with a static graph starts its operations in a callback at the end of a backward, and its C++ waits for
        # them in the same callback, where a simulated rank cannot pass its turn on.
        if must_wait and is_at_end_of_backward() and not self._is_settling():
            return Done(settle(cast("T", call(async_op=False, timeout=timeout))))
        # Fast path of a synchronous call. A callback in the lane queues instead, which keeps the order of the group.
        if not is_async and not self._is_settling() and not (is_behind_all and self._under_way()):
            return Done(settle(cast("T", call(async_op=False, timeout=timeout))))
        running = cast("Work[T]", call(async_op=True, timeout=timeout))
        # Two jobs, since the Work must be complete before the future's callbacks run.
        end = f"the end of {running.description}"
        settled = self._queue(lambda: list(settle(running.result())), end)
        outcome: Outcome[list[Tensor]] = Outcome()
        job = self._queue(lambda: self._complete(outcome, settled), end)
        with self._adding:
            while self._jobs and self._jobs[0].has_ended:
                self._jobs.popleft()
            self._jobs.append(job)
        # Who waits for one of them waits for the collective.
        settled.lateness = job.lateness = running.lateness
        outcome.is_driven_by(job)
        if must_wait and is_in_backward():
            _finish_before_end_of_backward(job)
        work = Pending(settled, outcome, self._orphans)
        if not is_async:
            work.wait()
        return work

    def _under_way(self) -> list[Work[None]]:
        """Returns the ends of operations that have not ended."""
        return [each for each in tuple(self._jobs) if not each.has_ended]

    def _queue(self, function: Callable[[], T], description: str) -> Work[T]:
        return self.group.backend.lanes.start(function, description, self.group.context)

    def _complete(self, outcome: Outcome[list[Tensor]], work: Work[list[Tensor]]) -> None:
        """Completes a future in the lane's thread, which then runs its callbacks."""
        # Nested: a callback may wait for an Outcome, and the lane's thread then runs queued jobs.
        was_settling = self._is_settling()
        self._thread.settles = True
        try:
            outcome.settle(work.result)
        finally:
            self._thread.settles = was_settling
            if (error := work.exception()) is not None and (self._failed is None or self._failed[0].is_watched):
                self._failed = outcome, without_frames(error)

    def _is_settling(self) -> bool:
        """Whether a callback in the lane's thread is running. Jobs queued before it come before its own operations."""
        return getattr(self._thread, "settles", False)
