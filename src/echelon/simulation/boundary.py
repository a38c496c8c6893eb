"""Where a simulated rank's program and the library meet.

Every call into the library begins and ends here. At its beginning the time passes that the program has computed since
its last call; in between others may have turns; at its end the process is the program's again, with the random numbers
of its rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from echelon.backends.wire import readable
from echelon.errors import DeadlockError
from echelon.simulation.task import Ended, Task
from echelon.simulation.world import World

_LOOKS = 1_000_000
"""How often a program may look at the time and do nothing else, while nothing can make it pass."""


class Boundary:
    """The boundary of one rank. Called by whichever of its tasks runs."""

    def __init__(self, rank: int, world: World) -> None:
        self._rank = rank
        self._world = world
        self._scheduler = world.scheduler
        self._meter = world.meter
        self._random_states = world.random_states
        self._is_computing = False
        self._num_looks = 0

    def enter(self) -> Task:
        """Begins a call: the calling task may go on, and the time passes that it has computed since its last call.

        Raises:
            Ended: its rank was killed, or the simulation is over.
            UnsupportedOp: the calling thread is none of the simulation's.
        """
        task = self._scheduler.current()
        if task.is_doomed:
            raise Ended
        self._num_looks = 0
        if self._meter is not None:
            self._spend(self._meter.stop((self._rank, task.number)))
        return task

    def leave(self, task: Task) -> None:
        """Ends a call: gives the process back to the program of this rank, with its random numbers."""
        if task.depth == 0:
            self._random_states.install(self._rank)
        if self._meter is not None:
            self._meter.start((self._rank, task.number))

    def attend(self) -> Attention:
        """Marks a call that makes others in between."""
        return Attention(self, self._scheduler.current())

    def enter_library(self, task: Task) -> None:
        """Begins such a call."""
        if task.depth == 0:
            self.enter()
            task.entered_at = self._scheduler.now
            task.operation = ""
        task.depth += 1
        self.leave(task)

    def leave_library(self, task: Task) -> None:
        """Ends it. A collective becomes a span of the timeline, unless it is part of a step."""
        if task.depth > 1:
            task.depth -= 1
            return
        try:
            self.enter()
        finally:
            task.depth = 0
        if task.operation:
            recorder, began, now = self._world.recorder, task.entered_at, self._scheduler.now
            operation = readable(task.operation)
            if task.number:
                recorder.span_beside(self._rank, task.number, operation, began, now)
            elif not self._is_computing:
                recorder.span(self._rank, operation, began, now)
        self.leave(task)

    def now(self) -> float:
        """Returns the virtual time.

        Raises:
            DeadlockError: costs are not measured, and the program has looked a million times and done nothing else.
        """
        if self._meter is None:
            self._num_looks += 1
            if self._num_looks > _LOOKS and self._scheduler.is_running_here():
                raise DeadlockError(
                    f"rank {self._rank} has looked at the time {_LOOKS:,} times at {self._scheduler.now:g} s, and done "
                    "nothing else: no virtual time passes meanwhile, so it would look for ever: wait for a message "
                    'with a timeout, or use costs="measured"'
                )
        elif self._scheduler.is_running_here():
            self.leave(self.enter())
        return self._scheduler.now

    @contextmanager
    def compute(self, step: object) -> Iterator[None]:
        """Lets the time pass that `step` costs, and adds it to the timeline; steps inside of others are not counted."""
        if self._is_computing:
            yield
            return
        self._num_looks = 0
        began = self.now()
        self._is_computing = True
        try:
            yield
        finally:
            self._is_computing = False
        if self._world.cost is not None:
            self._spend(self._world.cost(self._rank, step))
        self._world.recorder.span(self._rank, step, began, self.now())

    def _spend(self, seconds: float) -> None:
        if self._world.faults.faults:
            seconds = self._world.faults.duration(self._rank, self._scheduler.now, seconds)
        self._world.traffic.compute(self._rank, seconds)


class Attention:
    """A call that makes others in between, none of which gives the process back to the program."""

    __slots__ = ("_boundary", "_task")

    def __init__(self, boundary: Boundary, task: Task) -> None:
        self._boundary = boundary
        self._task = task

    def __enter__(self) -> None:
        self._boundary.enter_library(self._task)

    def __exit__(self, *_: object) -> None:
        self._boundary.leave_library(self._task)
