"""Scheduler that runs threads one at a time, in the order of a virtual clock.

Strategy. Every task is a thread that sleeps on a lock of its own, its gate. Only the task whose gate was opened last
runs. A task that has to wait takes events from a queue ordered by (time, draw) and runs them, until an event is the
turn of a task: it opens that task's gate and sleeps on its own. So there is no scheduling thread, nothing else is
locked, and the order depends on the program and the draws only. It ends because every task that does not run is in the
queue, or waits. Once the queue is empty and no timeout of the program's own is left, nothing can ever happen: that is a
deadlock, and all tasks are made to leave with `Ended`.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident

from echelon.backends.work import Work
from echelon.errors import EchelonError, UnsupportedOp


# A BaseException, so that a program's `except Exception` does not catch it.
class Ended(BaseException):
    """Raised in a task to end it: its rank was killed, or the simulation is over. Programs need not handle it."""


class Task:
    """Thread that takes turns with others, and its state in the scheduler."""

    __slots__ = (
        "_body",
        "_leave",
        "awaits",
        "deadline",
        "depth",
        "entered_at",
        "gate",
        "ident",
        "insists",
        "is_doomed",
        "is_idle",
        "is_queued",
        "num_polls",
        "number",
        "operation",
        "origin",
        "polled_at",
        "polls",
        "rank",
        "thread",
        "turn",
    )

    def __init__(
        self,
        rank: int,
        number: int,
        body: Callable[[], None],
        origin: str,
        leave: Callable[[Task], None],
    ) -> None:
        self.rank = rank
        self.number = number
        """0 for a rank's main task, from 1 for its lanes."""
        self.origin = origin
        """Line of the program that started a lane. Empty for a main task."""
        self.awaits: Work[object] | None = None
        self.deadline = math.inf
        self.insists = False
        """Whether the program itself gave the deadline, rather than the default timeout."""
        self.is_idle = False
        self.is_doomed = False
        """Whether it was cancelled and has to leave at its next turn."""
        self.depth = 0
        """Number of nested library calls that it is in. No code of the program runs meanwhile."""
        self.entered_at = 0.0
        """Virtual time at which it entered the outermost of these calls."""
        self.operation = ""
        """Collective that it is in. Empty if none."""
        self.ident = 0
        """Identifier of the thread, once it runs."""
        self.gate = threading.Lock()
        self.gate.acquire()
        self.turn = 0
        """Number of its turns. An event for an earlier turn is stale."""
        self.is_queued = False
        """Whether its next turn is in the queue."""
        self.polls = False
        """Whether it waits because it polled too often."""
        self.polled_at = -1.0
        """Virtual time of its last poll. `num_polls` counts the polls at that time."""
        self.num_polls = 0
        self._body = body
        self._leave = leave
        name = f"simulated rank {rank}" + (f", lane {number}" if number else "")
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self.gate.acquire()
        self.ident = get_ident()
        self.begin_turn()
        try:
            if not self.is_doomed:
                self._body()
        except Ended:
            pass
        finally:
            self._leave(self)

    def forget(self) -> None:
        """Drops the reference to its function, after its end."""
        self._body = _nothing

    def begin_turn(self) -> None:
        """Starts a turn, which makes all events for earlier turns stale."""
        self.turn += 1
        self.is_queued = False


def _nothing() -> None: ...


_PATIENCE = 100
"""Polls of a task at one instant before a poll becomes a wait."""


class Scheduler:
    """Tasks, clock and event queue of one simulation."""

    def __init__(self, draws: Callable[[], float]) -> None:
        """Makes a scheduler without tasks.

        Args:
            draws: called once per event. Of two events at one time, the one with the lower draw comes first.
        """
        self.now = 0.0
        """Virtual seconds since the start."""
        self.awaits_nothing_lost = True
        """Whether all messages will arrive. If not, a wait until the default timeout is no deadlock."""
        self.on_stuck: Callable[[Sequence[Task]], EchelonError | None] = _unexplained
        """Called with tasks that wait for ever. Adds an event that helps them, or returns the error to end with."""
        self.available_at: Callable[[int, float], float] = _at_once
        """Function of rank and time that returns when a turn at that time can be taken. math.inf: never."""
        self.error: BaseException | None = None
        """Error that ended the simulation before its tasks ended. None without one."""
        self.is_ending = False
        self.draw = draws
        """Returns the next draw, which orders events at the same time."""
        # (time, draw, number, task or action, turn). The number is unique, so that two tasks are never compared.
        self._events: list[tuple[float, float, int, Task | Callable[[], object], int]] = []
        self._numbers = itertools.count()
        self._tasks: dict[Task, None] = {}
        self._threads: list[threading.Thread] = []
        self._pollers: list[Task] = []
        self._running: Task | None = None
        self._is_stopped = False
        self._first_deadline = math.inf
        """Lower bound of the deadlines of all waiting tasks, so that few events have to look at all of them."""
        self._finished = threading.Lock()
        self._finished.acquire()

    # Called by the thread that starts the simulation. A running task may call `add`, too.

    def add(self, rank: int, body: Callable[[], None], number: int = 0, origin: str = "") -> Task:
        """Adds a task, with its first turn at the present time. Does not block."""
        task = Task(rank, number, body, origin, self.leave)
        self._tasks[task] = None
        self._threads.append(task.thread)
        task.thread.start()
        self._schedule(task, self.now)
        return task

    def run(self) -> None:
        """Opens the first task's gate and blocks until all tasks have ended. The calling thread is no task."""
        first = self._next()
        assert first is not None, "a simulation has at least one task"
        self._running = first
        first.gate.release()
        try:
            self._finished.acquire()
        except BaseException:  # such as KeyboardInterrupt, which only the main thread gets
            self._stop()
            raise
        for thread in self._threads:
            thread.join()

    def _stop(self) -> None:
        """Makes all threads leave at once, in any order. Interrupts a computing thread by an exception."""
        self.is_ending = self._is_stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.is_doomed = True
        # The running task may be computing in the program, so only an asynchronous exception reaches it.
        running = self._running
        if running is not None and running.thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(running.thread.ident), ctypes.py_object(Ended))
        for task in tasks:
            with contextlib.suppress(RuntimeError):  # in the middle of a hand-over a gate is open already
                task.gate.release()
        for task in tasks:
            task.thread.join()

    def forget(self) -> None:
        """Drops all references, after the end."""
        self._events.clear()
        self._tasks.clear()
        self._threads.clear()
        self._pollers.clear()
        self._running = None
        self.error = None
        self.on_stuck, self.available_at = _unexplained, _at_once

    # Called by the running task

    def current(self) -> Task:
        """Returns the running task, which must be the calling thread.

        Raises:
            UnsupportedOp: the calling thread is none of the simulation's.
        """
        task = self._running
        if task is None or task.ident != get_ident():
            raise UnsupportedOp(
                f"thread {threading.current_thread().name!r} is not one of the simulation's: call the group from the "
                "thread that runs the rank; for threads of your own use SimulatedBackend.create_group"
            )
        return task

    def is_running_here(self) -> bool:
        """Whether the calling thread is the running task."""
        return self._running is not None and self._running.ident == get_ident()

    def at(self, time: float, action: Callable[[], object], draw: float | None = None) -> None:
        """Schedules `action`, which must not block, for `time`. Of two at one time, the lower draw comes first."""
        heapq.heappush(self._events, (time, self.draw() if draw is None else draw, next(self._numbers), action, -1))

    def actions(self) -> list[Callable[[], object]]:
        """Returns the pending actions, in no order."""
        return [what for _, _, _, what, _ in self._events if not isinstance(what, Task)]

    def sleep(self, seconds: float) -> None:
        """Blocks the running task for `seconds` of virtual time. math.inf: for ever."""
        task = self._running
        assert task is not None
        until = self.now + seconds
        if until == math.inf:
            self._put_off(task, until)
            self._pass_on(task)
        elif (self._events and self._events[0][0] <= until) or self._first_deadline < until or self._is_bound(task):
            self._schedule(task, until)
            self._pass_on(task)
        else:
            # Fast path: nothing happens meanwhile, so the clock moves without a hand-over.
            self.now = until

    def wait(self, work: Work[object], deadline: float, insists: bool) -> bool:
        """Blocks the running task until `work` is completed. False if the deadline comes first.

        Args:
            work: operation that other tasks or events complete.
            deadline: virtual time.
            insists: whether the program itself gave the deadline. A default timeout does not count when nothing else
                can happen: that is a deadlock.
        """
        task = self._running
        assert task is not None
        # With the turn, so that a completion after the deadline does not wake a later wait of the task.
        work.on_completion(partial(self._notify, task, task.turn))
        task.awaits, task.deadline, task.insists = work, deadline, insists
        if deadline < self._first_deadline:
            self._first_deadline = deadline
        try:
            self._pass_on(task)
        finally:
            task.awaits = None
        return work.has_ended

    def poll(self, work: Work[object]) -> bool:
        """Runs all events of this instant, then returns whether `work` is completed.

        From the 100th poll at one instant it blocks until an event happens: a loop that polls would otherwise stop the
        clock for ever.
        """
        task = self._running
        assert task is not None
        if task.polled_at != self.now:
            task.polled_at, task.num_polls = self.now, 0
        task.num_polls += 1
        if task.num_polls < _PATIENCE:
            self._schedule(task, self.now)
            self._pass_on(task)
            return work.has_ended
        # In `_pollers`, too: a program may poll several Works in turn, so any action wakes it, not this Work only.
        task.polls = True
        self._pollers.append(task)
        try:
            return self.wait(work, math.inf, False)
        finally:
            task.polls = False

    def stir(self) -> None:
        """Wakes busy-polling tasks after an event."""
        for task in self._pollers:
            if task.polls and not task.is_queued:
                self._schedule(task, self.now)
        self._pollers.clear()

    def rest(self) -> None:
        """Blocks the running task until `rouse`. An idle task counts for no deadlock."""
        task = self._running
        assert task is not None
        task.is_idle = True
        try:
            self._pass_on(task)
        finally:
            task.is_idle = False

    def rouse(self, task: Task) -> None:
        """Wakes an idle task at the present time. No effect on others."""
        if task.is_idle and not task.is_queued:
            self._schedule(task, self.now)

    def cancel(self, rank: int | None = None) -> None:
        """Makes all tasks of a rank (None: all tasks) leave with `Ended`. Schedules their next turn now."""
        for task in self._tasks:
            if not task.is_doomed and rank in (None, task.rank):
                task.is_doomed = True
                self._schedule(task, self.now)

    def fail(self, error: BaseException) -> None:
        """Ends the simulation with an error that belongs to no rank. The first error counts."""
        if not self.is_ending:
            self.is_ending = True
            self.error = error
        self.cancel()

    def leave(self, task: Task) -> None:
        """Removes a task at the end of its thread, and opens the next one's gate."""
        self._tasks.pop(task, None)
        task.forget()
        if self._is_stopped:
            return
        try:
            following = self._next()
        except BaseException as error:  # an event raised, and this thread has no program that could raise the error
            self.fail(error)
            following = self._next()
        self._running = following
        (self._finished if following is None else following.gate).release()

    # Inside

    def _is_bound(self, task: Task) -> bool:
        return task.is_doomed or self.available_at(task.rank, self.now) > self.now

    def _schedule(self, task: Task, time: float) -> None:
        task.is_queued = True
        heapq.heappush(self._events, (time, self.draw(), next(self._numbers), task, task.turn))

    def _notify(self, task: Task, turn: int) -> None:
        if task.turn == turn and not task.is_queued:
            self._schedule(task, self.now)

    def _pass_on(self, task: Task) -> None:
        """Runs events, then passes the turn on and blocks until it is this task's turn again."""
        if self._is_stopped or task.is_doomed:
            raise Ended
        try:
            following = self._next()
        except BaseException as error:
            self.fail(error)
            following = self._next()
        assert following is not None, "a task that waits is woken, or all are made to leave"
        # Fast path: the same task goes on, without a hand-over between threads.
        if following is not task:
            self._running = following
            # Release before acquire: in between both threads are awake, but this one touches nothing of the scheduler.
            following.gate.release()
            task.gate.acquire()
        task.begin_turn()
        if task.is_doomed:
            raise Ended

    def _next(self) -> Task | None:
        """Runs events until one is the turn of a task, and returns that task. None when no task is left."""
        events = self._events
        while True:
            # Deadlines are not in the queue: the next one is looked up when no earlier event is left.
            if not events or events[0][0] > self._first_deadline:
                if not self._tasks:
                    return None
                self._look_at_deadlines()
                continue
            time, _, _, what, turn = heapq.heappop(events)
            if isinstance(what, Task):
                # Stale: the task was woken earlier, or has ended. The clock must not move for it.
                if what.turn != turn or what not in self._tasks:
                    continue
                if not what.is_doomed and (later := self.available_at(what.rank, time)) > time:
                    self._put_off(what, later)
                    continue
                self.now = time
                return what
            self.now = time
            what()
            if self._pollers:
                self.stir()

    def _put_off(self, task: Task, time: float) -> None:
        if time < math.inf:
            self._schedule(task, time)
        else:
            task.is_queued = True  # for ever: only `cancel` gives it another turn
            self.awaits_nothing_lost = False

    def _look_at_deadlines(self) -> None:
        """Wakes the task with the next deadline, if no event comes before it. Reports a deadlock if none counts."""
        while self._events and self._is_stale(self._events[0]):
            heapq.heappop(self._events)
        waiting = [task for task in self._tasks if task.awaits is not None and not task.is_queued]
        first = min(waiting, key=lambda task: task.deadline, default=None)
        self._first_deadline = math.inf if first is None else first.deadline
        if self._events and self._events[0][0] <= self._first_deadline:
            return
        # With no event left, only a deadline of the program's own, or a lost message, makes a timeout a legal end.
        heeds = not self.awaits_nothing_lost or any(task.insists for task in waiting)
        if first is not None and first.deadline < math.inf and (self._events or heeds):
            # max: the clock never goes back, and a deadline may lie in the past.
            self._schedule(first, max(self.now, first.deadline))
        elif waiting:
            if error := self.on_stuck(waiting):
                self.fail(error)
        else:  # only idle lanes, and ranks that are paused for ever, are left
            self.is_ending = True
            self.cancel()

    def _is_stale(self, event: tuple[float, float, int, Task | Callable[[], object], int]) -> bool:
        what = event[3]
        return isinstance(what, Task) and (what.turn != event[4] or what not in self._tasks)


def _unexplained(tasks: Sequence[Task]) -> EchelonError:
    return EchelonError(f"{len(tasks)} tasks wait for ever")


def _at_once(rank: int, time: float) -> float:  # noqa: ARG001
    return time
