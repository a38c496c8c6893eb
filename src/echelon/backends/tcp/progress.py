"""Progress engine of one backend: waiting threads take turns to poll, and a background thread polls if none waits.

Strategy. One lock guards all state; no call blocks while it holds the lock. At most one thread polls at a time. A
thread that waits on a Work polls for all until its Work is done; the others sleep on a condition. A thread that stops
polling wakes another one, whether it waited itself or only polled once. A thread that completes a Work while another
one polls wakes that thread (eventfd). The background thread polls only while operations are in flight that no thread
waits for; a thread that begins to wait wakes it and takes over. A signal's handler may interrupt the thread that polls
and wait, too. It then polls itself, and the interrupted poll ends early. Closing wakes the polling thread, and frees
the poller only when no thread polls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from echelon.backends.tcp.poller import Poller
from echelon.backends.work import Work
from echelon.errors import Closed

_GLANCE_SECONDS = 0.25
"""Seconds between two polls of the background thread while nothing is in flight: a peer may ask for this rank's
status."""
_STEP_SECONDS = 60.0
"""Seconds after which a waiting thread polls again at the latest."""
_LEAVE_SECONDS = 1.0
"""Seconds that closing waits for the polling thread to notice."""


class Progress:
    """Drives all operations in flight of one backend. Methods are called with `lock` held unless they say otherwise."""

    def __init__(
        self,
        rank: int,
        poller: Poller,
        is_busy: Callable[[], bool],
        may_spin: Callable[[], bool],
        closed_error: Callable[[], Closed],
    ) -> None:
        """Starts no thread yet: see `start_background`.

        Args:
            rank: shown in warnings and the name of the thread.
            poller: closed by `free`.
            is_busy: whether operations are in flight; also called without the lock.
            may_spin: whether the calling thread may spin while it waits.
            closed_error: makes the error of waits that closing ends.
        """
        self.lock = threading.Lock()
        self.is_closed = False
        self._rank = rank
        self._poller = poller
        self._is_busy = is_busy
        self.may_spin = may_spin
        """Whether the calling thread may spin while it waits."""
        self._closed_error = closed_error
        self._changed = threading.Condition(self.lock)
        self._background_wanted = threading.Condition(self.lock)
        self._num_waiters = 0
        self._polling_thread = 0
        """Thread that polls. 0: none."""
        self._background_polls = False
        self._background_was_kept_out = False
        """Whether the background thread sleeps only because another thread was in `poll_once`."""
        self._background: threading.Thread | None = None
        self.wait_scope = WaitScope(self._on_leave)
        """Scope in which a caller waits for its own operations; the background thread stays asleep. Needs no lock."""

    # Waiting

    def drive(self, work: Work[object], timeout: float | None) -> bool:
        """Polls, or waits for the polling thread, until `work` is completed. False if the time is up first.

        Takes the lock itself.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        with self.lock:
            self._num_waiters += 1
            try:
                while not work.is_completed():
                    now = time.monotonic()
                    if now >= deadline:
                        return False
                    self._step(min(deadline - now, _STEP_SECONDS), own_waits=1)
                return True
            finally:
                self._num_waiters -= 1
                if self._num_waiters:  # hands the poller over: this thread may have been the one that polled
                    self._changed.notify_all()
                else:
                    self.call_background()

    def step(self, seconds: float) -> None:
        """Polls once, or sleeps until the polling thread wakes it. Releases the lock for at most `seconds`."""
        self._step(seconds, own_waits=0)

    def _step(self, seconds: float, own_waits: int) -> None:
        if self.is_closed:
            raise self._closed_error()
        if self._may_poll():
            self._poll(seconds, self.may_spin(), own_waits)
            return
        if self._background_polls:  # makes it stop: a waiting thread that polls itself saves a switch of threads
            self._poller.wake()
        self._changed.wait(seconds)

    def poll_once(self) -> None:
        """Polls without blocking, unless another thread polls. Releases the lock meanwhile."""
        if self.is_closed:
            raise self._closed_error()
        if self._may_poll():
            self._poll(0, False)
            if self._background_was_kept_out:
                self._background_wanted.notify()

    @property
    def _is_polling(self) -> bool:
        return self._polling_thread != 0

    def _may_poll(self) -> bool:
        # The second is true in a signal's handler: the poll that it interrupts goes on after it alone.
        return not self._is_polling or self._polling_thread == threading.get_ident()

    def wake(self) -> None:
        """Wakes every waiting thread, because a Work may have completed outside of polling."""
        if self._is_polling and not self.is_closed:
            self._poller.wake()
        self._changed.notify_all()

    def wake_waiters(self) -> None:
        """Wakes every waiting thread, if there is one, because the caller may have completed its Work."""
        if self._num_waiters:
            self.wake()

    def _on_leave(self) -> None:
        """Leaves operations that are still in flight to the background thread."""
        # Checked without the lock first: the caller sees its own operations, and another thread that starts one later
        # calls the background thread itself.
        if self._is_busy():
            with self.lock:
                self.call_background()

    # The thread in the background

    def call_background(self) -> None:
        """Wakes the background thread if operations are in flight and no thread waits, or has said that it will."""
        if self._num_waiters or self.wait_scope.includes_caller() or self.is_closed or not self._is_busy():
            return
        if not self._background_polls:
            self._background_wanted.notify()

    def start_background(self) -> None:
        """Starts the background thread."""
        name = f"echelon rank {self._rank}, progress"
        self._background = threading.Thread(target=self._run_background, name=name, daemon=True)
        self._background.start()

    def _run_background(self) -> None:
        with self.lock:
            while not self.is_closed:
                seconds = -1.0
                if self._num_waiters or self._is_polling or not self._is_busy():
                    self._background_was_kept_out = self._is_polling and not self._num_waiters
                    # After a quarter of a second without a call it polls once, for questions of peers.
                    if self._background_wanted.wait(_GLANCE_SECONDS) or self._num_waiters or self._is_polling:
                        continue
                    seconds = 0.0
                self._background_polls = True
                self._poll(seconds, False)
                self._background_polls = False

    def _poll(self, seconds: float, spins: bool, own_waits: int = 0) -> None:
        """Polls once without the lock; `own_waits` is 1 if the calling thread counts as a waiter, else 0."""
        interrupted = self._polling_thread
        self._polling_thread = threading.get_ident()  # under the lock, so no second thread polls
        self.lock.release()
        try:
            events = self._poller.wait(seconds, spins)
        finally:
            self.lock.acquire()
            self._polling_thread = interrupted
        if interrupted:  # its work may be done, and peers take this rank for awake
            self._poller.wake()
        if self.is_closed:  # `close` waits for this thread to leave the poller
            self._changed.notify_all()
            return
        self._poller.dispatch(events)
        if self._num_waiters > own_waits:
            self._changed.notify_all()

    # The end

    def close(self) -> None:
        """Ends every wait, and waits until no thread polls any more."""
        self.is_closed = True
        self._poller.wake()
        self._changed.notify_all()
        self._background_wanted.notify_all()
        # Closing an epoll does not wake a thread that sleeps in it, and another file may get its number at once.
        self._changed.wait_for(lambda: not self._is_polling, _LEAVE_SECONDS)

    def free(self) -> None:
        """Ends the background thread and closes the poller, after `close`. To be called without the lock."""
        if self._background is not None and self._background is not threading.current_thread():
            self._background.join()
        self._poller.close()

    def become_child(self) -> None:
        """Closes a forked child's copies of the parent's files; takes no lock.

        The lock is replaced: the thread that may have held it does not exist in the child, nor do waiting threads.
        """
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._num_waiters = 0
        self.is_closed = True
        self._poller.close()


class WaitScope:
    """Set of threads that wait for their own operations. Needs no lock: a thread changes only its own entry."""

    __slots__ = ("_counts", "_on_leave")

    def __init__(self, on_leave: Callable[[], None]) -> None:
        """Calls `on_leave` in a thread that leaves its outermost scope."""
        self._counts: dict[int, int] = {}
        self._on_leave = on_leave

    def includes_caller(self) -> bool:
        """Whether the calling thread is inside a scope."""
        return threading.get_ident() in self._counts

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._counts[thread] = self._counts.get(thread, 0) + 1

    def __exit__(self, *_: object) -> None:
        thread = threading.get_ident()
        count = self._counts.pop(thread)
        if count > 1:
            self._counts[thread] = count - 1
        else:
            self._on_leave()
