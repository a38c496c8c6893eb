"""Thread pools whose jobs communicate: on simulated ranks their jobs run in lanes, which take turns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from echelon.errors import Timeout, UnsupportedOp
from echelon.replacements import Replacement
from echelon.simulation.process.store import FOREVER

if TYPE_CHECKING:
    from echelon.backends.work import Work
    from echelon.simulation.backend import VirtualLanes

COMMUNICATING = frozenset({"torch.distributed.checkpoint._async_thread_executor"})
"""Modules whose jobs call collectives: `torch.distributed.checkpoint.async_save`."""
_OF_PROCESSES = "torch.distributed.checkpoint._async_process_executor"


class LaneFuture(Future[Any]):
    """Future of a job in a lane. Its waits take virtual time."""

    def __init__(self) -> None:
        super().__init__()
        self._work: Work[None] | None = None

    def is_completed_by(self, work: Work[None]) -> None:
        """Sets the operation that completes this future."""
        self._work = work

    def done(self) -> bool:
        """Whether the job has ended, after the other ranks had a turn."""
        if self._work is not None:
            self._work.is_completed()
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        """Blocks until the job has ended. Returns its result, or raises its error.

        Raises:
            TimeoutError: not within `timeout` virtual seconds.
        """
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Blocks until the job has ended. Returns its error, None if it succeeded.

        Raises:
            TimeoutError: not within `timeout` virtual seconds.
        """
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        if self._work is not None:
            with suppress(Timeout):  # the call that follows raises the TimeoutError of the standard library
                self._work.wait(FOREVER if timeout is None else timeout)


def pools_in_lanes(lanes_here: Callable[[], VirtualLanes | None]) -> list[Replacement]:
    """Lets jobs of the modules of `COMMUNICATING` run in lanes of the rank that submits them.

    Other jobs keep their threads: they cannot call a simulated group, and need not.

    Args:
        lanes_here: Returns the lanes of the calling rank. None in threads that are no rank's.

    `submit` raises UnsupportedOp for jobs of `async_save` that start processes.
    """

    def submitting(original: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
        def submit(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            module = getattr(fn, "__module__", None)
            lanes = lanes_here() if module in COMMUNICATING or module == _OF_PROCESSES else None
            if lanes is None:
                return original(self, fn, *args, **kwargs)
            if module == _OF_PROCESSES:
                raise UnsupportedOp(
                    "async_save with AsyncCheckpointerType.PROCESS starts a process for each rank, which no simulated "
                    "rank can talk to: use AsyncCheckpointerType.THREAD"
                )
            future = LaneFuture()
            job = partial(_settle, future, partial(fn, *args, **kwargs))
            # Groups have positive numbers.
            future.is_completed_by(lanes.start(job, "a job of a thread pool", -id(self)))
            return future

        return submit

    return [Replacement(ThreadPoolExecutor, "submit", submitting)]


def _settle(future: Future[Any], job: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = job()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)
