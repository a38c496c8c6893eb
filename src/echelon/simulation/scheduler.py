"""Runs threads one at a time, in the order of a virtual clock.

Strategy. Every task is a thread that sleeps on a lock of its own, its gate; only the task whose gate was opened last
runs. A task that has to wait takes the next event from a queue ordered by (time, draw), carries it out,
and goes on until an event is the turn of a task: it opens that task's gate and sleeps on its own. So there is no
scheduling thread, nothing is locked, and what happens depends on the program and the draws alone. It ends because every
task that is not running is in the queue, or waits; when the queue is empty and no time limit of the program's own is
left, nothing can ever happen: that is a deadlock, and all tasks are made to leave with `Ended`.
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

# A thread that takes turns with others, and what a scheduler knows of it.


class Ended(BaseException):
    """Makes a task leave: its rank was killed, or the simulation is over. No error: programs need not expect it."""


class Task:
    """A thread that takes turns with others."""

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
        """0 for a rank's own task, then one for each of its lanes."""
        self.origin = origin
        """Where the program started it, for a task beside a rank's own; empty for that."""
        self.awaits: Work[object] | None = None
        self.deadline = math.inf
        self.insists = False
        """Whether the program itself gave the deadline, instead of leaving it at the default."""
        self.is_idle = False
        self.is_doomed = False
        """Whether it is to leave."""
        self.depth = 0
        """How many calls into the library it is in, during which no code of the program runs."""
        self.entered_at = 0.0
        """When it entered the first of these calls."""
        self.operation = ""
        """The collective that it is in, if it is in one."""
        self.ident = 0
        """Of the thread, once it runs."""
        self.gate = threading.Lock()
        self.gate.acquire()
        self.turn = 0
        """Counts its turns; an event for an earlier one is stale."""
        self.is_queued = False
        """Whether its next turn is in the queue."""
        self.polls = False
        """Whether it waits because it looked too often."""
        self.polled_at = -1.0
        """When it last looked whether something is done, and how often at that instant."""
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
        """Lets go of what it runs, after its end."""
        self._body = _nothing

    def begin_turn(self) -> None:
        """Makes all events for earlier turns stale."""
        self.turn += 1
        self.is_queued = False


def _nothing() -> None: ...


_PATIENCE = 100
"""How often a task may look at one instant whether something is done, before its looking becomes waiting."""


class Scheduler:
    """The tasks of one simulation, its clock and its queue of events."""

    def __init__(self, draws: Callable[[], float]) -> None:
        """Has no tasks yet.

        Args:
            draws: called for each event; of two at one time the one with the lower draw is first.
        """
        self.now = 0.0
        """Seconds since the start."""
        self.awaits_nothing_lost = True
        """Whether all that was sent will arrive; if not, waiting until the default timeout is no deadlock."""
        self.on_stuck: Callable[[Sequence[Task]], EchelonError | None] = _unexplained
        """Called with tasks that wait for ever: enters an event that helps them, or returns the error to end with."""
        self.available_at: Callable[[int, float], float] = _at_once
        """When a rank that has a turn at some time can take it; math.inf: never."""
        self.error: BaseException | None = None
        """Why the simulation ended before its tasks did."""
        self.is_ending = False
        self.draw = draws
        """Returns the next draw: what decides between events at the same time."""
        self._events: list[tuple[float, float, int, Task | Callable[[], object], int]] = []
        self._numbers = itertools.count()
        self._tasks: dict[Task, None] = {}
        self._threads: list[threading.Thread] = []
        self._pollers: list[Task] = []
        self._running: Task | None = None
        self._is_stopped = False
        self._first_deadline = math.inf
        """No task waits until an earlier time than this."""
        self._finished = threading.Lock()
        self._finished.acquire()

    # Called by whoever starts the simulation

    def add(self, rank: int, body: Callable[[], None], number: int = 0, origin: str = "") -> Task:
        """Makes a task that has its first turn now, in its order among what happens now."""
        task = Task(rank, number, body, origin, self.leave)
        self._tasks[task] = None
        self._threads.append(task.thread)
        task.thread.start()
        self._schedule(task, self.now)
        return task

    def run(self) -> None:
        """Blocks until all tasks have ended, in this thread, which is none of them."""
        first = self._next()
        assert first is not None, "a simulation has at least one task"
        self._running = first
        first.gate.release()
        try:
            self._finished.acquire()
        except BaseException:
            self._stop()
            raise
        for thread in self._threads:
            thread.join()

    def _stop(self) -> None:
        """Makes all threads leave at once, in no order; one that computes is interrupted by an exception."""
        self.is_ending = self._is_stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.is_doomed = True
        running = self._running
        if running is not None and running.thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(running.thread.ident), ctypes.py_object(Ended))
        for task in tasks:
            with contextlib.suppress(RuntimeError):
                task.gate.release()
        for task in tasks:
            task.thread.join()

    def forget(self) -> None:
        """Lets go of everything, after the end."""
        self._events.clear()
        self._tasks.clear()
        self._threads.clear()
        self._pollers.clear()
        self._running = None
        self.error = None
        self.on_stuck, self.available_at = _unexplained, _at_once

    # Called by the running task

    def current(self) -> Task:
        """Returns the task that runs, which must be the calling thread.

        Raises:
            UnsupportedOp: the calling thread is none of the simulation's.
        """
        task = self._running
        if task is None or task.ident != get_ident():
            raise UnsupportedOp(
                f"thread {threading.current_thread().name!r} is not one of the simulation's: simulated ranks talk from "
                "the thread that they were started in; for threads of your own use SimulatedBackend.create_group"
            )
        return task

    def is_running_here(self) -> bool:
        """Says whether the calling thread is the task that runs."""
        return self._running is not None and self._running.ident == get_ident()

    def at(self, time: float, action: Callable[[], object], draw: float | None = None) -> None:
        """Has `action` called at `time`; it must not block. Of two at one time the lower draw is first."""
        heapq.heappush(self._events, (time, self.draw() if draw is None else draw, next(self._numbers), action, -1))

    def actions(self) -> list[Callable[[], object]]:
        """Returns what is to be called later."""
        return [what for _, _, _, what, _ in self._events if not isinstance(what, Task)]

    def sleep(self, seconds: float) -> None:
        """Lets `seconds` pass for the running task; math.inf: it never goes on."""
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
            self.now = until

    def wait(self, work: Work[object], deadline: float, insists: bool) -> bool:
        """Blocks the running task until `work` is completed; returns False if the deadline comes first.

        Args:
            work: completed by other tasks or events.
            deadline: time on the virtual clock.
            insists: whether the program gave the deadline; else it is no reason to go on when nothing else can happen.
        """
        task = self._running
        assert task is not None
        work.on_completion(partial(self._notify, task, task.turn))
        task.awaits, task.deadline, task.insists = work, deadline, insists
        if deadline < self._first_deadline:
            self._first_deadline = deadline
        try:
            self._pass_on(task)
        finally:
            task.awaits = None
        return work._completed

    def poll(self, work: Work[object]) -> bool:
        """Lets whatever can happen now happen, then says whether `work` is completed.

        A loop that looks again and again at one instant would hold up the clock for ever: at some point it waits until
        anything happens.
        """
        task = self._running
        assert task is not None
        if task.polled_at != self.now:
            task.polled_at, task.num_polls = self.now, 0
        task.num_polls += 1
        if task.num_polls < _PATIENCE:
            self._schedule(task, self.now)
            self._pass_on(task)
            return work._completed
        task.polls = True
        self._pollers.append(task)
        try:
            return self.wait(work, math.inf, False)
        finally:
            task.polls = False

    def stir(self) -> None:
        """Gives a turn to the tasks that look again and again for something to happen: something has."""
        for task in self._pollers:
            if task.polls and not task.is_queued:
                self._schedule(task, self.now)
        self._pollers.clear()

    def rest(self) -> None:
        """Blocks the running task until `rouse`; it is not waiting for anything."""
        task = self._running
        assert task is not None
        task.is_idle = True
        try:
            self._pass_on(task)
        finally:
            task.is_idle = False

    def rouse(self, task: Task) -> None:
        """Gives a resting task its turn, now."""
        if task.is_idle and not task.is_queued:
            self._schedule(task, self.now)

    def cancel(self, rank: int | None = None) -> None:
        """Makes all tasks of a rank (None: all tasks) leave, at their next turn."""
        for task in self._tasks:
            if not task.is_doomed and rank in (None, task.rank):
                task.is_doomed = True
                self._schedule(task, self.now)

    def fail(self, error: BaseException) -> None:
        """Ends the simulation with an error that is no rank's."""
        if not self.is_ending:
            self.is_ending = True
            self.error = error
        self.cancel()

    def leave(self, task: Task) -> None:
        """Takes a task out, at the end of its thread, and lets the next one run."""
        self._tasks.pop(task, None)
        task.forget()
        if self._is_stopped:
            return
        try:
            following = self._next()
        except BaseException as error:  # a mistake in an event: nobody could be told otherwise
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
        """Lets others run until it is this task's turn again."""
        if self._is_stopped or task.is_doomed:
            raise Ended
        try:
            following = self._next()
        except BaseException as error:
            self.fail(error)
            following = self._next()
        assert following is not None, "a task that waits is woken, or all are made to leave"
        if following is not task:
            self._running = following
            following.gate.release()
            task.gate.acquire()
        task.begin_turn()
        if task.is_doomed:
            raise Ended

    def _next(self) -> Task | None:
        """Carries out events until one is the turn of a task; returns it, or None when no task is left."""
        events = self._events
        while True:
            if not events or events[0][0] > self._first_deadline:
                if not self._tasks:
                    return None
                self._look_at_deadlines()
                continue
            time, _, _, what, turn = heapq.heappop(events)
            if isinstance(what, Task):
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
            task.is_queued = True  # for ever: only its doom gives it another turn
            self.awaits_nothing_lost = False

    def _look_at_deadlines(self) -> None:
        """Ends the wait whose deadline is next, unless an event comes before it; ends all if there is none to heed."""
        while self._events and self._is_stale(self._events[0]):
            heapq.heappop(self._events)
        waiting = [task for task in self._tasks if task.awaits is not None and not task.is_queued]
        first = min(waiting, key=lambda task: task.deadline, default=None)
        self._first_deadline = math.inf if first is None else first.deadline
        if self._events and self._events[0][0] <= self._first_deadline:
            return
        heeds = not self.awaits_nothing_lost or any(task.insists for task in waiting)
        if first is not None and first.deadline < math.inf and (self._events or heeds):
            self._schedule(first, max(self.now, first.deadline))
        elif waiting:
            if error := self.on_stuck(waiting):
                self.fail(error)
        else:
            self.is_ending = True
            self.cancel()

    def _is_stale(self, event: tuple[float, float, int, Task | Callable[[], object], int]) -> bool:
        what = event[3]
        return isinstance(what, Task) and (what.turn != event[4] or what not in self._tasks)


def _unexplained(tasks: Sequence[Task]) -> EchelonError:
    return EchelonError(f"{len(tasks)} tasks wait for ever")


def _at_once(rank: int, time: float) -> float:  # noqa: ARG001
    return time
