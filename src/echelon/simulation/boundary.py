"""Boundary between a simulated rank's program and the library, and the operations that a program waits for.

Strategy. All code here runs in the one task that has the turn, so nothing is locked. A wait passes the turn on until
the Work is completed. A rank's main task and its lanes are both tasks of the scheduler.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from echelon._torch_private.modules import never_compiled
from echelon.backends.delivery import ANY
from echelon.backends.formats.wire import Tag, readable
from echelon.backends.work import Received, Work
from echelon.errors import DeadlockError, SizeMismatch, inherited_error
from echelon.simulation.scheduler import Ended, Task
from echelon.simulation.world import World, is_plain

T = TypeVar("T")


SEND = "send to"


# A tuple instead of text: it is made for each message, and only errors need the words.
class Activity(NamedTuple):
    """Description of a send or receive, converted to text only for errors."""

    doing: str
    peer: int
    tag: Tag

    def __str__(self) -> str:
        tag = str(self.tag) if self.tag.sequence else f"tag {self.tag.step}"
        peer = "any rank" if self.peer == ANY else f"rank {self.peer}"
        return f"{self.doing} {peer}, {tag}"


class VirtualWork(Work[T]):
    """Operation of a simulated rank. `is_completed` runs the other ranks first."""

    __slots__ = ("boundary", "operation", "peer", "tag")

    def __init__(
        self, boundary: Boundary, description: object, timeout: float, peer: int, operation: str, tag: Tag | None
    ) -> None:
        super().__init__(boundary, description, timeout)
        self.boundary = boundary
        self.peer = peer
        """Rank that this operation waits for, or ANY."""
        self.operation = operation
        """Name of the program's operation. Empty for a plain send or receive."""
        self.tag = tag
        """Tag of a receive that is no part of a collective. None otherwise, and once the receive is recorded."""

    def awaited(self) -> tuple[int, ...]:
        """Returns the ranks that this operation waits for: its own rank for an asynchronous one, ANY for any rank."""
        return (self.peer,)

    def is_completed(self) -> bool:
        """Whether the operation has ended, after all events of this instant have run."""
        return self.has_ended or self.boundary.poll(self)  # type: ignore[arg-type]

    def wait(self, timeout: float | None = None) -> T:
        """Blocks until the operation ends and returns its result; see `Work.wait`."""
        try:
            result = super().wait(timeout)
        except SizeMismatch as error:
            if self.tag is not None:
                self.boundary.tell_line_of_send(error, self.peer, self.tag)
            raise
        if self.tag is not None:
            self.boundary.took(self.source_of(result), self.tag)
            self.tag = None
        return result

    def source_of(self, result: T) -> int:  # noqa: ARG002
        """Returns the rank that sent the message."""
        return self.peer


class FromAny(VirtualWork[Received]):
    """Receive from any of several ranks, whichever sends first."""

    __slots__ = ("_sources",)

    def __init__(
        self, boundary: Boundary, timeout: float, operation: str, tag: Tag, sources: Mapping[int, int]
    ) -> None:
        plain = tag if is_plain(tag) else None
        super().__init__(boundary, Activity("receive from", ANY, tag), timeout, ANY, operation, plain)
        self._sources = sources

    def source_of(self, result: Received) -> int:  # noqa: D102
        return next(src for src, number in self._sources.items() if number == result.src)


class StoreWait(VirtualWork[None]):
    """Wait for an act of any other rank on a store of torch.distributed."""

    __slots__ = ()

    def __init__(self, boundary: Boundary, what: str, timeout: float) -> None:
        super().__init__(boundary, what, timeout, ANY, what, None)


_NEARLY = 1 - 1e-9
"""Factor below which a time limit counts as shorter than the default; rounding alone must not make it so."""
_LOOKS = 1_000_000
"""Most reads of the clock in a row, if no virtual time can pass between them."""


class Boundary:
    """Boundary between a simulated rank's program and the library. Called by the running task of the rank.

    Every call into the library begins and ends here. At its start, the time that the program has computed since its
    last call passes. In between other ranks may have turns. At its end, control goes back to the program, with the
    rank's state of the process.
    """

    def __init__(self, rank: int, world: World, timeout: float) -> None:
        self._rank = rank
        self._world = world
        self._timeout = timeout
        self._process = os.getpid()
        self._scheduler = world.scheduler
        self._clock = world.scheduler.clock
        self._meter = world.meter
        self._is_computing = False
        self._num_looks = 0

    def enter(self) -> Task:
        """Begins a call: lets the time pass that the program has computed since its last call. May pass the turn on.

        Raises:
            Ended: the rank was killed, or the simulation is over.
            UnsupportedOp: the calling thread is none of the simulation's.
        """
        task = self._scheduler.current()
        if task.is_cancelled:
            raise Ended
        self._num_looks = 0
        if self._meter is not None and not task.is_moving:
            began = self._clock.now
            self._spend(self._meter.stop((self._rank, task.number)), True)
            # Inside of a call or of a step the time belongs to the span of that.
            if task.number == task.depth == 0 and not self._is_computing:
                self._world.recorder.computed(self._rank, began, self._clock.now)
        return task

    def leave(self, task: Task) -> None:
        """Ends a call: returns control to the program of this rank, with its state of the process."""
        # Not inside a nested call: no code of the program runs before the outermost one ends, so the states of another
        # rank may stay installed.
        if task.depth == 0:
            self._world.rank_states.install(self._rank)
        if self._meter is not None and not task.is_moving:
            self._meter.start((self._rank, task.number))

    def resume(self) -> None:
        """Installs the rank's state of the process within nested calls, too, as code of its program runs in them."""
        self._world.rank_states.install(self._rank)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Inside, the calling task executes a collective. Its computing there takes no virtual time.

        The network has the cost of the collective. The computing here is that of the simulation.
        """
        task = self.enter()
        task.is_moving = True
        try:
            yield
        finally:
            task.is_moving = False
            self.leave(task)

    @never_compiled
    def drive(self, work: Work[object], timeout: float | None) -> bool:
        """Blocks, in virtual time, until `work` is completed. False if the time is up before."""
        if self._is_inherited:  # the other ranks are threads, which a forked child does not have
            raise inherited_error(f"the backend of rank {self._rank}", self._process)
        task = self.enter()
        # The limit of a nested wait is compared from the start of the outermost call, which has the group's timeout. A
        # shorter limit is the program's own: then a timeout is a legal end, not a deadlock.
        began = task.entered_at if task.depth else self._clock.now
        deadline = math.inf if timeout is None else self._clock.now + timeout
        done = self._scheduler.wait(work, deadline, deadline - began < self._timeout * _NEARLY)
        self.leave(task)
        return done

    @never_compiled
    def poll(self, work: Work[object], polled: object = None) -> bool:
        """Runs all events of this instant, then returns whether `work`, or `polled` if it is given, is completed."""
        if not self._scheduler.is_running_here() or self._is_inherited:
            return False
        task = self.enter()
        done = self._scheduler.poll(work, id(work) if polled is None else polled)
        self.leave(task)
        return done

    def took(self, src: int, tag: Tag) -> None:
        """Records the dependency of the next step on this message."""
        self._world.recorder.took(self._rank, src, tag)

    def tell_line_of_send(self, error: SizeMismatch, src: int, tag: Tag) -> None:
        """Adds the line of the send to the error of a message that does not fit its receive."""
        sent = f"send to rank {self._rank}, tag {tag.step} of {error.got}"
        calls = reversed(self._world.flight_recorders[src].records())
        line = next((call.place for call in calls if call.operation == sent), "")
        if line and line not in str(error):
            error.args = (f"{error}; rank {src} sends it at {line}",)

    @property
    def _is_inherited(self) -> bool:
        return os.getpid() != self._process

    def begin(self) -> None:
        """Starts the program of the rank: installs its state of the process and starts its stopwatch."""
        self.leave(self._scheduler.current())

    @contextmanager
    def will_wait(self) -> Iterator[None]:
        """Inside, calls of the library may be nested. Control returns to the program when the outermost ends.

        A collective becomes a span of the timeline, unless it is part of a step.
        """
        task = self._scheduler.current()
        if task.depth == 0:
            self.enter()
            task.entered_at = self._clock.now
            task.operation = ""
        task.depth += 1
        self.leave(task)
        try:
            yield
        finally:
            if task.depth > 1:
                task.depth -= 1
            else:
                self._end_outermost(task)

    def _end_outermost(self, task: Task) -> None:
        try:
            self.enter()
        finally:
            task.depth = 0
        if task.operation:
            recorder, began, now = self._world.recorder, task.entered_at, self._clock.now
            operation = readable(task.operation)
            if task.number:
                recorder.span_beside(self._rank, task.number, operation, began, now)
            elif not self._is_computing:
                recorder.span(self._rank, operation, began, now)
        self.leave(task)

    def now(self) -> float:
        """Returns the virtual time.

        Raises:
            DeadlockError: costs are not measured, and the program has read the clock a million times in a row.
        """
        # A loop that only reads the clock would never end: without measured costs no time passes between two reads.
        if self._meter is None:
            self._num_looks += 1
            if self._num_looks > _LOOKS and self._scheduler.is_running_here():
                raise DeadlockError(
                    f"rank {self._rank} has read the clock {_LOOKS:,} times in a row at {self._clock.now:g} s, and "
                    "no virtual time passes between two reads: wait for a message with a timeout, or use "
                    'costs="measured"'
                )
        elif self._scheduler.is_running_here():
            self.leave(self.enter())
        return self._clock.now

    @contextmanager
    def compute(self, step: object) -> Iterator[None]:
        """Inside, the program computes `step`. At the exit its cost passes, and it becomes a span of the timeline.

        A step inside another one costs nothing and is no span.
        """
        if self._is_computing:
            yield
            return
        self._num_looks = 0
        began = self.now()
        self.resume()  # a pipeline computes within a nested call while its sends are under way
        self._is_computing = True
        try:
            yield
            if self._world.cost is not None:
                self._spend(self._world.cost(self._rank, step), False)
            ended = self.now()
        finally:
            self._is_computing = False
        self._world.recorder.span(self._rank, step, began, ended)

    def _spend(self, seconds: float, on_one_core: bool) -> None:
        if self._world.faults.faults:
            seconds = self._world.faults.duration(self._rank, self._clock.now, seconds)
        self._world.traffic.compute(self._rank, seconds, on_one_core)
