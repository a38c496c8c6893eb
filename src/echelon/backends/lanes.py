"""Threads that run asynchronous operations of a backend: one per lane, started when needed, ended when idle for long.

Strategy. Operations of one lane run in the order they were started, lanes run beside each other. A group uses one lane,
so two groups never wait for each other. Whoever waits on such a Work sleeps on a condition; the lane's thread wakes it.
An operation may itself wait for a later one of its lane: the lane's thread then runs the queue meanwhile. A lane
without work for some seconds ends its thread, because nobody says when a group is used for the last time.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar, cast

from echelon._native import Calls
from echelon.backends.work import Work
from echelon.errors import Closed, inherited_error

CHECK_SECONDS = 0.02
"""Seconds between two looks for a reason to stop waiting, where a wait itself cannot tell."""
_leaving: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads of lanes that have closed all lanes, as in a callback of a future.

They are still in torch's C++ then, where the end of Python would abort the process.
"""
CAUSE_SECONDS = 10.0
"""Seconds that an operation waits for the error of an earlier one of its group, whose thread asks the other ranks."""


@atexit.register
def _wait_for_leaving() -> None:
    for thread in _leaving:
        thread.join(CAUSE_SECONDS)


def wait_checking(ends_within: Callable[[float], bool], check_liveness: Callable[[], None]) -> None:
    """Blocks until an operation has ended. Calls `check_liveness` every 20 ms; an exception ends the wait.

    Args:
        ends_within: waits for some seconds, and returns whether the operation has ended.
        check_liveness: raises the reason to stop waiting, if there is one.
    """
    while not ends_within(CHECK_SECONDS):
        check_liveness()


def wait_for_news(seconds: float, now: Callable[[], float], check_liveness: Callable[[], None]) -> None:
    """Blocks until `check_liveness` raises a failure that another thread or rank is about to tell, or time is up.

    Args:
        seconds: most time to wait.
        now: returns the time, in seconds.
        check_liveness: called every 20 ms; raises the failure once it is known.
    """
    until = now() + seconds

    def is_over(seconds: float) -> bool:
        time.sleep(seconds)
        return now() >= until

    wait_checking(is_over, check_liveness)


class InOrder:
    """Sequencer: the operations of one group pass one at a time, in the order of their numbers, in any threads.

    Operation 1 passes first. An operation that fails lets the next one pass as well."""

    def __init__(self, numbers: Calls | None = None) -> None:
        """Counts in `numbers`, which the native library moves too; None: in its own."""
        self._numbers = Calls() if numbers is None else numbers
        self._num_waiting = 0
        self._changed = threading.Condition()

    @property
    def next(self) -> int:
        """Number of the operation that can pass without `enter`, because all before it have left."""
        return self._numbers.left + 1

    def enter(self, number: int, check_liveness: Callable[[], None]) -> None:
        """Returns when all operations before `number` have left.

        Args:
            number: of the operation.
            check_liveness: called every 20 ms; an exception ends the wait.
        """
        with self._changed:
            self._num_waiting += 1
            try:
                wait_checking(
                    lambda seconds: self._changed.wait_for(lambda: self.next >= number, seconds), check_liveness
                )
            finally:
                self._num_waiting -= 1

    def leave(self, number: int) -> None:
        """Lets the operation after `number` pass."""
        self._numbers.left = number
        if self._num_waiting:
            with self._changed:
                self._changed.notify_all()


T = TypeVar("T")

IDLE_SECONDS = 10.0
"""After how long a thread without work ends. Longer than a step of training, since a new one begins without caches."""


class Lanes(ABC):
    """Lanes of one backend. Operations of one lane run in order; lanes overlap."""

    progress_by_themselves = True
    """Whether operations go on while a thread of the rank blocks in code that knows no lanes, such as torch's C++."""

    @abstractmethod
    def start(self, function: Callable[[], T], description: str, lane: int = 0) -> Work[T]:
        """Queues `function` on a lane. The Work completes with its result or error.

        Raises:
            Closed: after `close`, and in a forked child.
        """

    @abstractmethod
    def close(self, timeout: float) -> None:
        """Ends the lanes after they have run their queues; waits at most `timeout` seconds for each."""


class ThreadLanes(Lanes):
    """Lanes that are a thread each."""

    def __init__(self, name: str, timeout: float) -> None:
        self._name = name
        self._timeout = timeout
        self._changed = threading.Condition()
        self._queues: dict[int, SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._own: dict[int, SimpleQueue[Callable[[], None] | None]] = {}
        self._num_waiters = 0
        self._closed = False
        self._process = os.getpid()

    def start(self, function: Callable[[], T], description: str, lane: int = 0) -> Work[T]:  # noqa: D102
        self._check_process()
        work: Work[T] = Work(self, description, self._timeout)

        def run() -> None:
            try:
                result, error = function(), None
            except BaseException as raised:
                result, error = None, raised
            with self._changed:
                work.complete(result, error)
                self._changed.notify_all()

        with self._changed:
            if self._closed:
                raise Closed(f"{self._name} is closed: {description} was not started")
            self._queue(lane).put(run)
        return work

    def drive(self, work: Work[object], timeout: float | None) -> bool:
        """Blocks until a Work of a lane is completed. False if the time is up first.

        A lane's own thread runs the queue of its lane meanwhile, as it may wait for an operation behind its own.

        Raises:
            Closed: in a forked child, which has no lanes: nobody would complete the Work.
        """
        self._check_process()
        own = self._own.get(threading.get_ident())
        while own is not None and not own.empty() and not work.is_completed():
            job = own.get()  # nobody else takes from it
            if job is None:
                own.put(None)
                break
            job()
        seconds = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)  # more raises OverflowError
        with self._changed:
            self._num_waiters += 1
            try:
                return self._changed.wait_for(work.is_completed, seconds)
            finally:
                self._num_waiters -= 1

    def runs_beside(self) -> bool:
        """Whether the caller is a lane's thread for which no thread waits, so that others may compute meanwhile."""
        return threading.get_ident() in self._own and not self._num_waiters

    def close(self, timeout: float) -> None:  # noqa: D102
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for queue in self._queues.values():
                queue.put(None)
            threads = list(self._threads.values())
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout)
            else:
                _leaving.add(thread)

    def _check_process(self) -> None:
        """Raises Closed in a forked child, before a lock is taken that a thread of the parent may have held."""
        if os.getpid() != self._process:
            raise inherited_error(self._name, self._process)

    def _queue(self, lane: int) -> SimpleQueue[Callable[[], None] | None]:
        queue = self._queues.get(lane)
        if queue is None:
            queue = self._queues[lane] = SimpleQueue()
            name = f"{self._name}, lane {len(self._queues)}"
            thread = threading.Thread(target=self._run, args=(lane, queue), name=name, daemon=True)
            self._threads[lane] = thread
            thread.start()
            self._own[cast("int", thread.ident)] = queue
        return queue

    def _run(self, lane: int, queue: SimpleQueue[Callable[[], None] | None]) -> None:
        """Runs the queue of one lane. Ends with all lanes, or after `IDLE_SECONDS` without work."""
        while True:
            try:
                job = queue.get(timeout=IDLE_SECONDS)
            except Empty:
                if self._ends_idle(lane, queue):
                    return
                continue
            if job is None:
                return
            job()
            del job  # and with it the tensors it works on, which would else live until the next one comes

    def _ends_idle(self, lane: int, queue: SimpleQueue[Callable[[], None] | None]) -> bool:
        """Takes a lane out, unless work has come just now."""
        with self._changed:
            if not queue.empty():
                return False
            del self._queues[lane], self._threads[lane], self._own[threading.get_ident()]
            return True
