"""Who polls: the threads that wait on a backend's one poller, and the background thread that stands in.

Strategy. One lock guards everything; no call blocks while it holds it. A thread that waits on a Work polls for all
until its Work is done; at most one thread polls at a time, the others sleep on a condition, and the one that stops
polling wakes another, whether it waited itself or only had a look. Whoever completes something while another thread
polls pokes that thread (eventfd). A background thread polls only while something is under way that no thread waits for;
a thread that comes to wait pokes it and takes over. Closing pokes whoever polls, and frees the poller only when nobody
does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from echelon.backends.tcp.poller import Poller
from echelon.backends.work import Work
from echelon.errors import Closed

_GLANCE_SECONDS = 0.25
"""While nothing is under way, the background thread looks this often whether a peer asks where this rank is."""
_STEP_SECONDS = 60.0
"""A thread that waits looks again after this long at the latest."""
_LEAVE_SECONDS = 1.0
"""How long closing waits for the thread that polls to notice."""


class Progress:
    """Drives everything that is under way in one backend. Methods are to be called with `lock` held unless they say
    otherwise."""

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
            poller: what to poll; closed by `free`.
            is_busy: says whether anything is under way; also called without the lock.
            may_spin: says whether the calling thread, which waits, has a core to itself.
            closed_error: makes what waits end with when the backend is closed.
        """
        self.lock = threading.Lock()
        self.is_closed = False
        self._rank = rank
        self._poller = poller
        self._is_busy = is_busy
        self._may_spin = may_spin
        self._closed_error = closed_error
        self._changed = threading.Condition(self.lock)
        self._background_wanted = threading.Condition(self.lock)
        self._num_waiters = 0
        self._is_polling = False
        self._background_polls = False
        self._background_was_kept_out = False
        """Whether the background thread sleeps because another one polled, which waits for nothing."""
        self._background: threading.Thread | None = None
        self._attendance = WaitScope(self._on_leave)

    # Waiting

    def drive(self, work: Work[object], timeout: float | None) -> bool:
        """Polls, or waits for the thread that does, until `work` is completed; returns False when the time is up.

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
                if self._num_waiters:
                    self._changed.notify_all()
                else:
                    self.call_background()

    def step(self, seconds: float) -> None:
        """Polls once, or sleeps until the thread that polls has something to say; gives up the lock meanwhile."""
        self._step(seconds, own_waits=0)

    def _step(self, seconds: float, own_waits: int) -> None:
        if self.is_closed:
            raise self._closed_error()
        if not self._is_polling:
            self._poll(seconds, self._may_spin(), own_waits)
            return
        if self._background_polls:
            self._poller.wake()
        self._changed.wait(seconds)

    def poll_once(self) -> None:
        """Polls without waiting, unless another thread polls; gives up the lock meanwhile."""
        if self.is_closed:
            raise self._closed_error()
        if not self._is_polling:
            self._poll(0, False)
            if self._background_was_kept_out:
                self._background_wanted.notify()

    def wake(self) -> None:
        """Has every waiting thread look again, because something was completed outside of polling."""
        if self._is_polling and not self.is_closed:
            self._poller.wake()
        self._changed.notify_all()

    def wake_waiters(self) -> None:
        """Has every thread that waits look again, because the calling one may have completed what is theirs."""
        if self._num_waiters:
            self.wake()

    def will_wait(self) -> WaitScope:
        """Returns a context in which the calling thread waits for all that it starts. Needs no lock."""
        return self._attendance

    def _on_leave(self) -> None:
        """Leaves what is still under way to the background thread.

        What the calling thread has begun it sees without the lock. Who begins something else later calls for itself.
        """
        if self._is_busy():
            with self.lock:
                self.call_background()

    # The thread in the background

    def call_background(self) -> None:
        """Has the background thread drive what is under way, unless a thread waits, or said that it will."""
        if self._num_waiters or self._attendance.includes_caller() or self.is_closed or not self._is_busy():
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
                    if self._background_wanted.wait(_GLANCE_SECONDS) or self._num_waiters or self._is_polling:
                        continue
                    seconds = 0.0
                self._background_polls = True
                self._poll(seconds, False)
                self._background_polls = False

    def _poll(self, seconds: float, spins: bool, own_waits: int = 0) -> None:
        """Polls once; `own_waits` is 1 if the calling thread is one of those that wait, else 0."""
        self._is_polling = True
        self.lock.release()
        try:
            events = self._poller.wait(seconds, spins)
        finally:
            self.lock.acquire()
            self._is_polling = False
        if self.is_closed:
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
        # Closing an epoll does not wake who sleeps in it, and its number may be another file's a moment later.
        self._changed.wait_for(lambda: not self._is_polling, _LEAVE_SECONDS)

    def free(self) -> None:
        """Ends the background thread and closes the poller, after `close`. To be called without the lock."""
        if self._background is not None and self._background is not threading.current_thread():
            self._background.join()
        self._poller.close()

    def become_child(self) -> None:
        """Closes in a forked child what belongs to the parent; takes no lock.

        The lock is replaced: the thread that may have held it is not here, and neither are those that waited.
        """
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._num_waiters = 0
        self.is_closed = True
        self._poller.close()


class WaitScope:
    """The threads that wait for all that they start. Needs no lock: a thread changes only its own entry."""

    __slots__ = ("_counts", "_on_leave")

    def __init__(self, on_leave: Callable[[], None]) -> None:
        """Calls `on_leave` in a thread that no longer attends."""
        self._counts: dict[int, int] = {}
        self._on_leave = on_leave

    def includes_caller(self) -> bool:
        """Says whether the calling thread attends."""
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
