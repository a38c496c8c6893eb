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
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident

from echelon.backends.work import Work
from echelon.call_site import Place, calling_place, source_of
from echelon.errors import EchelonError, UnsupportedOp


# A BaseException, so that a program's `except Exception` does not catch it.
class Ended(BaseException):
    """Raised in a task to end it: its rank was killed, or the simulation is over. Programs need not handle it."""


@dataclass(slots=True, eq=False)
class Task:
    """Thread that takes turns with others, and its state in the scheduler."""

    rank: int
    number: int
    """0 for a rank's main task, from 1 for its lanes."""
    body: Callable[[], None]
    leave: Callable[[Task], None]
    origin: Place | None = None
    """Line of the program that started the present operation of a lane. None for a main task."""
    awaits: Work[object] | None = None
    deadline: float = math.inf
    insists: bool = False
    """Whether the program itself gave the deadline, rather than the default timeout."""
    is_idle: bool = False
    is_cancelled: bool = False
    """Whether it has to leave at its next turn."""
    has_ended: bool = False
    depth: int = 0
    """Number of nested library calls that it is in. No code of the program runs meanwhile."""
    entered_at: float = 0.0
    """Virtual time at which it entered the outermost of these calls."""
    operation: str = ""
    """Collective that it is in. Empty if none."""
    is_moving: bool = False
    """Whether it executes a collective, whose cost is that of the network alone."""
    ident: int = 0
    """Identifier of the thread, once it runs."""
    gate: threading.Lock = field(default_factory=threading.Lock)
    turn: int = 0
    """Number of its turns. An event for an earlier turn is stale."""
    is_queued: bool = False
    """Whether its next turn is in the queue."""
    polls: bool = False
    """Whether it waits because it polled too often."""
    polled_at: float = -1.0
    """Virtual time of its last poll."""
    num_polls: Counter[object] = field(default_factory=Counter)
    """Polls in vain at that time since its last wait, by the polled thing."""
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.gate.acquire()  # closed until the first turn
        name = f"simulated rank {self.rank}" + (f", lane {self.number}" if self.number else "")
        # daemon: one that is left behind in C code must not keep the process from ending.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self.gate.acquire()
        self.ident = get_ident()
        self.begin_turn()
        try:
            if not self.is_cancelled:
                self.body()
        except Ended:
            pass
        finally:
            self.body = _nothing  # the end of a task may be long before that of the simulation
            self.has_ended = True
            self.leave(self)

    def begin_turn(self) -> None:
        """Starts a turn, which makes all events for earlier turns stale."""
        self.turn += 1
        self.is_queued = False


def _nothing() -> None: ...


class Clock:
    """Virtual clock, and the queue of events by which it moves: actions, and turns of tasks."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.now = 0.0
        """Virtual seconds since the start."""
        self.draw = draw
        """Returns the next draw, which orders events at the same time."""
        self.has_lost_events = False
        """Whether an event will never come, such as the arrival of a lost message."""
        # (time, draw, number, task or action, turn). The number is unique, so that two tasks are never compared.
        self.events: list[tuple[float, float, int, Task | Callable[[], object], int]] = []
        """Heap of all events."""
        self.pollers: list[Task] = []
        """Tasks that wait because they polled too often."""
        self._numbers = itertools.count()

    def at(self, time: float, action: Callable[[], object], draw: float | None = None) -> None:
        """Schedules `action`, which must not block, for `time`. Of two at one time, the lower draw comes first."""
        heapq.heappush(self.events, (time, self.draw() if draw is None else draw, next(self._numbers), action, -1))

    def add_turn(self, task: Task, time: float) -> None:
        """Schedules the next turn of a task. math.inf: never, unless it is cancelled."""
        task.is_queued = True
        if time < math.inf:
            heapq.heappush(self.events, (time, self.draw(), next(self._numbers), task, task.turn))
        else:
            self.has_lost_events = True

    def wake(self, task: Task, turn: int) -> None:
        """Schedules a turn of a waiting task now. No effect if it was woken, or its turn `turn` is over."""
        if task.turn == turn and not task.is_queued:
            self.add_turn(task, self.now)

    def wake_pollers(self) -> None:
        """Wakes busy-polling tasks after an event."""
        for task in self.pollers:
            if task.polls:
                self.wake(task, task.turn)
        self.pollers.clear()

    def actions(self) -> list[Callable[[], object]]:
        """Returns the pending actions, in no order."""
        return [what for _, _, _, what, _ in self.events if not isinstance(what, Task)]

    def drop_stale(self) -> None:
        """Removes the first events as long as they are turns that tasks have had already."""
        while self.events:
            _, _, _, what, turn = self.events[0]
            if not isinstance(what, Task) or (what.turn == turn and not what.has_ended):
                return
            heapq.heappop(self.events)


_PATIENCE = 100
"""Polls of one operation at one instant, by a task that does not wait meanwhile, before a poll becomes a wait."""
_LOOK = 0.5
"""Seconds between two looks at the running task."""
_PARTING = 2.0
"""Seconds that interrupted threads get to leave."""


class Scheduler:
    """Tasks of one simulation, which take turns by its clock."""

    def __init__(self, draws: Callable[[], float]) -> None:
        """Makes a scheduler without tasks.

        Args:
            draws: called once per event. Of two events at one time, the one with the lower draw comes first.
        """
        self.clock = Clock(draws)
        self.on_stuck: Callable[[Sequence[Task]], EchelonError | None] = _unexplained
        """Called with tasks that wait for ever. Adds an event that helps them, or returns the error to end with."""
        self.available_at: Callable[[int, float], float] = _at_once
        """Function of rank and time that returns when a turn at that time can be taken. math.inf: never."""
        self.error: BaseException | None = None
        """Error that ended the simulation before its tasks ended. None without one."""
        self.watch: Callable[[Task | None], EchelonError | None] = _unwatched
        """Called twice a second with the running task. Returns the error to end with if it can never pass the turn."""
        self.whereabouts: Callable[[], str] = str
        """Returns where the tasks are, for the note of an interruption."""
        self.is_ending = False
        self.running: Task | None = None
        """Task that has the turn."""
        self._tasks: dict[Task, None] = {}
        self._threads: list[threading.Thread] = []
        self._is_stopped = False
        self._first_deadline = math.inf
        """Lower bound of the deadlines of all waiting tasks, so that few events have to look at all of them."""
        self._finished = threading.Lock()
        self._finished.acquire()
        self._process = os.getpid()

    # Called by the thread that starts the simulation. A running task may call `add`, too.

    def add(self, rank: int, body: Callable[[], None], number: int = 0) -> Task:
        """Adds a task, with its first turn at the present time. Does not block."""
        task = Task(rank, number, body, self._leave)
        self._tasks[task] = None
        self._threads.append(task.thread)
        task.thread.start()
        self.clock.add_turn(task, self.clock.now)
        return task

    def run(self) -> None:
        """Opens the first task's gate and blocks until all tasks have ended. The calling thread is no task.

        A thread that sleeps in C code cannot be made to leave. It is left behind if it does not wake in time.
        """
        first = self._next()
        assert first is not None, "a simulation has at least one task"
        self.running = first
        try:
            first.gate.release()
            while not self._finished.acquire(timeout=_LOOK):
                if error := self.watch(self.running):
                    self.error = error
                    self._stop()
                    return
        except BaseException as interrupt:  # such as KeyboardInterrupt, which only the main thread gets
            if where := self.whereabouts():  # before the tasks leave
                interrupt.add_note(where)
            self._stop()
            raise
        for thread in self._threads:
            thread.join()

    def begin_anew(self) -> None:
        """Lets tasks be added and run again after all have ended, also in a forked child."""
        self.is_ending = False
        self._process = os.getpid()

    def tasks(self) -> list[Task]:
        """Returns all tasks that have not ended."""
        return list(self._tasks)

    def _stop(self) -> None:
        self.is_ending = self._is_stopped = True
        _interrupt(list(self._tasks), self.running)

    def forget(self) -> None:
        """Drops all references, after the end."""
        self.clock.events.clear()
        self.clock.pollers.clear()
        self._tasks.clear()
        self._threads.clear()
        self.running = None
        self.error = None
        self.on_stuck, self.available_at, self.watch = _unexplained, _at_once, _unwatched
        self.whereabouts = str

    # Called by the running task

    def current(self) -> Task:
        """Returns the running task, which must be the calling thread.

        Raises:
            UnsupportedOp: the calling thread is none of the simulation's.
        """
        task = self.running
        if task is None or task.ident != get_ident():
            place = source_of(calling_place())
            raise UnsupportedOp(
                f"thread {threading.current_thread().name!r} communicates{place and f' at {place}'}, and is not one of "
                "the simulation's: communicate in the thread that runs the rank; for threads of your own use "
                "SimulatedBackend.create_group"
            )
        return task

    def is_running_here(self) -> bool:
        """Whether the calling thread is the running task."""
        return self.running is not None and self.running.ident == get_ident()

    def rank_here(self) -> int | None:
        """Returns the rank that the calling thread runs. None in other threads, and in a child process of a rank."""
        task = self.running
        return task.rank if task is not None and task.ident == get_ident() and os.getpid() == self._process else None

    def sleep(self, seconds: float) -> None:
        """Blocks the running task for `seconds` of virtual time. math.inf: for ever."""
        task = self.running
        assert task is not None
        clock = self.clock
        until, events = clock.now + seconds, clock.events
        happens_first = until == math.inf or (events and events[0][0] <= until) or self._first_deadline < until
        if happens_first or task.is_cancelled or self.available_at(task.rank, clock.now) > clock.now:
            clock.add_turn(task, until)
            self._pass_on(task)
        else:
            # Fast path: nothing happens meanwhile, so the clock moves without a hand-over.
            clock.now = until

    def wait(self, work: Work[object], deadline: float, insists: bool) -> bool:
        """Blocks the running task until `work` is completed. False if the deadline comes first.

        Args:
            work: operation that other tasks or events complete.
            deadline: virtual time.
            insists: whether the program itself gave the deadline. A default timeout does not count when nothing else
                can happen: that is a deadlock.
        """
        task = self.running
        assert task is not None
        task.num_polls.clear()
        self._wait(task, work, deadline, insists)
        return work.has_ended

    def _wait(self, task: Task, work: Work[object], deadline: float, insists: bool) -> None:
        # With the turn, so that a completion after the deadline does not wake a later wait of the task.
        work.on_completion(partial(self.clock.wake, task, task.turn))
        task.awaits, task.deadline, task.insists = work, deadline, insists
        if deadline < self._first_deadline:
            self._first_deadline = deadline
        try:
            self._pass_on(task)
        finally:
            task.awaits = None

    def poll(self, work: Work[object], polled: object) -> bool:
        """Runs all events of this instant, then returns whether `work` is completed.

        From the 100th poll in vain at one instant it blocks until an event happens: a loop that polls would otherwise
        stop the clock for ever.

        Args:
            work: operation that other tasks or events complete.
            polled: what the program polls. Only polls of one thing are counted together, and a wait ends the count: a
                program that looks once at each of many operations is in no loop, and others may wait for its next act.
        """
        task = self.running
        assert task is not None
        clock = self.clock
        if task.polled_at != clock.now:
            task.polled_at = clock.now
            task.num_polls.clear()
        task.num_polls[polled] += 1
        if task.num_polls[polled] < _PATIENCE:
            clock.add_turn(task, clock.now)
            self._pass_on(task)
        else:
            # In `pollers`, too: a program may poll several Works in turn, so any action wakes it, not this Work only.
            task.polls = True
            clock.pollers.append(task)
            try:
                self._wait(task, work, math.inf, insists=False)
            finally:
                task.polls = False
        if work.has_ended:
            task.num_polls.clear()
        return work.has_ended

    def park(self) -> None:
        """Blocks the running task until its clock wakes it. An idle task counts for no deadlock."""
        task = self.running
        assert task is not None
        task.is_idle = True
        try:
            self._pass_on(task)
        finally:
            task.is_idle = False

    def cancel(self, rank: int | None = None) -> None:
        """Makes all tasks of a rank (None: all tasks) leave with `Ended`. Schedules their next turn now."""
        for task in self._tasks:
            if not task.is_cancelled and rank in (None, task.rank):
                task.is_cancelled = True
                self.clock.add_turn(task, self.clock.now)

    def fail(self, error: BaseException) -> None:
        """Ends the simulation with an error that belongs to no rank. The first error counts."""
        if not self.is_ending:
            self.is_ending = True
            self.error = error
        self.cancel()

    # Inside

    def _leave(self, task: Task) -> None:
        """Removes a task at the end of its thread, and opens the next one's gate."""
        self._tasks.pop(task, None)
        if self._is_stopped:
            return
        try:
            following = self._next()
        except BaseException as error:  # an event raised, and this thread has no program that could raise the error
            self.fail(error)
            following = self._next()
        self.running = following
        (self._finished if following is None else following.gate).release()

    def _pass_on(self, task: Task) -> None:
        """Runs events, then passes the turn on and blocks until it is this task's turn again."""
        if self._is_stopped or task.is_cancelled:
            raise Ended
        try:
            following = self._next()
        except BaseException as error:
            self.fail(error)
            following = self._next()
        assert following is not None, "a task that waits is woken, or all are made to leave"
        # Fast path: the same task goes on, without a hand-over between threads.
        if following is not task:
            self.running = following
            # Release before acquire: in between both threads are awake, but this one touches nothing of the scheduler.
            following.gate.release()
            task.gate.acquire()
        task.begin_turn()
        if task.is_cancelled:
            raise Ended

    def _next(self) -> Task | None:
        """Runs events until one is the turn of a task, and returns that task. None when no task is left."""
        clock, events = self.clock, self.clock.events
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
                if what.turn != turn or what.has_ended:
                    continue
                if not what.is_cancelled and (later := self.available_at(what.rank, time)) > time:
                    clock.add_turn(what, later)
                    continue
                clock.now = time
                return what
            clock.now = time
            what()
            if clock.pollers:
                clock.wake_pollers()

    def _look_at_deadlines(self) -> None:
        """Wakes the task with the next deadline, if no event comes before it. Reports a deadlock if none counts."""
        clock = self.clock
        clock.drop_stale()
        waiting = [task for task in self._tasks if task.awaits is not None and not task.is_queued]
        first = min(waiting, key=lambda task: task.deadline, default=None)
        self._first_deadline = math.inf if first is None else first.deadline
        if clock.events and clock.events[0][0] <= self._first_deadline:
            return
        # With no event left, only a deadline of the program's own, or a lost message, makes a timeout a legal end.
        heeds = clock.has_lost_events or any(task.insists for task in waiting)
        if first is not None and first.deadline < math.inf and (clock.events or heeds):
            # max: the clock never goes back, and a deadline may lie in the past.
            clock.add_turn(first, max(clock.now, first.deadline))
        elif waiting:
            if error := self.on_stuck(waiting):
                self.fail(error)
        else:  # only idle lanes, and ranks that are paused for ever, are left
            self.is_ending = True
            self.cancel()


def _interrupt(tasks: Sequence[Task], running: Task | None) -> None:
    """Makes all threads leave at once, in any order. Interrupts a computing thread by an exception."""
    for task in tasks:
        task.is_cancelled = True
    # The running task may be computing in the program, so only an asynchronous exception reaches it.
    if running is not None and running.thread.ident is not None:
        raise_in([running.thread.ident], Ended)
    for task in tasks:
        with contextlib.suppress(RuntimeError):  # in the middle of a hand-over a gate is open already
            task.gate.release()
    deadline = time.monotonic() + _PARTING
    for task in tasks:
        task.thread.join(max(0.0, deadline - time.monotonic()))


def raise_in(threads: Sequence[int], error: type[BaseException]) -> None:
    """Raises an exception in other threads, by their numbers, each at its next instruction in Python."""
    for each in threads:
        _raise_in(each, error)
    if not threads:
        return
    # They may sleep in a lock for ever. Until some thread takes such an exception, each function of a profiled thread
    # waits for that, in Python 3.11. The other threads still get their own when they go on.
    try:
        _raise_in(get_ident(), Ended)
        while True:
            pass
    except Ended:
        pass


def _raise_in(thread: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _unexplained(tasks: Sequence[Task]) -> EchelonError:
    return EchelonError(f"{len(tasks)} tasks wait for ever")


def _unwatched(task: Task | None) -> EchelonError | None:  # noqa: ARG001
    return None


def _at_once(rank: int, time: float) -> float:  # noqa: ARG001
    return time
