"""Watchdog of a simulation: notices a rank that waits for another thread outside of the scheduler.

Strategy. The thread that started the simulation waits for its end, and looks twice a second. The turn passes on by the
library alone. So a rank that sleeps on a lock of its program's, or in C++, keeps the turn, and the rank that would wake
it never gets one. The watchdog reports it once nothing has moved for 5 s: no turn has passed, the process has computed
nothing, and the thread sleeps in a futex without a timeout. A rank that waits for a file, a child process or a time is
not reported. Neither is one that may wait for a thread which itself waits for something outside, as that of a pool of
processes does.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from echelon.simulation.native_wait import (
    NativeWait,
    has_children,
    native_wait,
    num_waits,
    started_at,
    threads,
    waiting_code,
)

if TYPE_CHECKING:
    from echelon.simulation.scheduler import Task

PATIENCE = 5.0
"""Seconds without any progress before a rank is reported."""
_OUTSIDE = 60.0
"""The same, if another thread of the process waits for something outside of the process."""
_TICK = 0.05
"""Seconds by which the system may round the start of a thread."""
_IDLE = 0.02
"""Share of the time that an idle process computes at most: its helper threads wake now and then."""


class Blocked(NamedTuple):
    """Running task that waits for another thread outside of the scheduler."""

    task: Task
    wait: NativeWait
    code: str
    """C function or library in which it waits. Empty if unknown, or it waits in Python itself."""


class Watchdog:
    """Observer of the running task, in a thread that is none of the simulation's."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds without progress."""
        self.is_idle = False
        """Whether there was no progress for that time at the last look, for whatever reason."""
        self._patience = patience
        self._began = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._bystanders: dict[int, int] | None = None
        """Threads that waited before the simulation began, and how often they had. None before the first look."""
        self._seen: tuple[Task | None, int] = (None, -1)
        self._since = 0.0
        self._computed = 0.0
        self._is_suspected = False
        """Whether the task looked blocked at the last look."""

    def look(self, running: Task | None) -> Blocked | None:
        """Returns the running task if it has been blocked for long enough."""
        now, computed = time.monotonic(), time.process_time()
        # Late: most simulations end before the first look.
        if self._bystanders is None:
            older = [thread for thread in threads() if started_at(thread) < self._began - _TICK]
            self._bystanders = {thread: num_waits(thread) for thread in older}
        turn = (running, -1 if running is None else running.turn)
        idle = now - self._since
        self.is_idle = False
        if turn != self._seen or computed - self._computed > _IDLE * max(idle, 1.0):
            self._seen, self._since, self._computed, self._is_suspected = turn, now, computed, False
            return None
        self.is_idle = running is not None and idle >= self._patience
        blocked = self._blocked(running, idle) if running is not None and self.is_idle else None
        # At a single look the thread that will wake the rank may just be about to: it needs a moment to go on.
        is_sure, self._is_suspected = self._is_suspected, blocked is not None
        return blocked if is_sure else None

    def _blocked(self, task: Task, idle: float) -> Blocked | None:
        """Returns the task if it looks blocked at this moment, after `idle` seconds without progress."""
        number = task.thread.native_id
        wait = None if number is None else native_wait(number)
        if number is None or wait is None or not wait.is_futex or not wait.is_endless:
            return None
        if self._waits_outside(number) and (idle < _OUTSIDE or has_children()):
            return None
        return Blocked(task, wait, waiting_code(wait))

    def _waits_outside(self, blocked: int) -> bool:
        """Whether another thread waits for something that is no thread of this process, and did not from the start."""
        known = self._bystanders or {}
        for thread in threads():
            if thread not in (blocked, threading.get_native_id()) and known.get(thread, -1) != num_waits(thread):
                wait = native_wait(thread)
                if wait is not None and not wait.is_futex:
                    return True
        return False
