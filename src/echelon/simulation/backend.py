"""Backend of a simulated rank: messages are events in a world with a virtual clock.

Strategy. All code here runs in the one task that has the turn, so nothing is locked. A send copies the tensor and puts
its arrival into the world's event queue. A wait passes the turn on until the Work is completed. A rank's main task and
its lanes are both tasks of the scheduler.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import get_ident
from typing import NamedTuple, TypeVar

import torch

from echelon.backends.base import Backend
from echelon.backends.delivery import ANY, Receive
from echelon.backends.formats.wire import Tag, readable
from echelon.backends.operators import Combine
from echelon.backends.status import Question, Status
from echelon.backends.work import Received, Work
from echelon.call_site import calling_place, source_of
from echelon.errors import DeadlockError, Failure, PeerFailed, Timeout
from echelon.operation_records import FlightRecorder
from echelon.simulation.scheduler import Ended, Task
from echelon.simulation.world import World, is_plain

T = TypeVar("T")


# A tuple instead of text: it is made for each message, and only errors need the words.
class Passage(NamedTuple):
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

    __slots__ = ("backend", "operation", "peer", "tag")

    def __init__(
        self, backend: VirtualBackend, description: object, peer: int, operation: str, tag: Tag | None
    ) -> None:
        super().__init__(backend, description, backend.timeout)
        self.backend = backend
        self.peer = peer
        """Rank that this operation waits for, or ANY."""
        self.operation = operation
        """Name of the program's operation. Empty for a plain send or receive."""
        self.tag = tag
        """Tag of a receive that is no part of a collective. None otherwise, and once the receive is recorded."""

    def is_completed(self) -> bool:
        """Whether the operation has ended, after all events of this instant have run."""
        return self._completed or self.backend.poll(self)  # type: ignore[arg-type]

    def wait(self, timeout: float | None = None) -> T:
        """Blocks until the operation ends and returns its result; see `Work.wait`."""
        result = super().wait(timeout)
        if self.tag is not None:
            # The next step of this rank depends on the message.
            self.backend.world.recorder.took(self.backend.rank, self.source_of(result), self.tag)
            self.tag = None
        return result

    def source_of(self, result: T) -> int:  # noqa: ARG002
        """Returns the rank that sent the message."""
        return self.peer


class FromAny(VirtualWork[Received]):
    """Receive from any of several ranks, whichever sends first."""

    __slots__ = ("_sources",)

    def __init__(self, backend: VirtualBackend, operation: str, tag: Tag, sources: Mapping[int, int]) -> None:
        plain = tag if is_plain(tag) else None
        super().__init__(backend, Passage("receive from", ANY, tag), ANY, operation, plain)
        self._sources = sources

    def source_of(self, result: Received) -> int:  # noqa: D102
        return next(src for src, number in self._sources.items() if number == result.src)


_LOOKS = 1_000_000
"""Most reads of the clock in a row, if no virtual time can pass between them."""


class Boundary:
    """Boundary between a simulated rank's program and the library. Called by the running task of the rank.

    Every call into the library begins and ends here. At its start, the time that the program has computed since its
    last call passes. In between other ranks may have turns. At its end, control and the rank's random states go back to
    the program.
    """

    def __init__(self, rank: int, world: World) -> None:
        self._rank = rank
        self._world = world
        self._scheduler = world.scheduler
        self._clock = world.scheduler.clock
        self._meter = world.meter
        self._random_states = world.random_states
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
        if self._meter is not None:
            self._spend(self._meter.stop((self._rank, task.number)))
        return task

    def leave(self, task: Task) -> None:
        """Ends a call: returns control to the program of this rank, with its random states."""
        # Not inside a nested call: no code of the program runs before the outermost one ends, so the states of another
        # rank may stay installed.
        if task.depth == 0:
            self._random_states.install(self._rank)
        if self._meter is not None:
            self._meter.start((self._rank, task.number))

    def is_running_here(self) -> bool:
        """Whether the calling thread is the running task."""
        running = self._scheduler.running
        return running is not None and running.ident == get_ident()

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
            if self._num_looks > _LOOKS and self.is_running_here():
                raise DeadlockError(
                    f"rank {self._rank} has read the clock {_LOOKS:,} times in a row at {self._clock.now:g} s, and "
                    "no virtual time passes between two reads: wait for a message with a timeout, or use "
                    'costs="measured"'
                )
        elif self.is_running_here():
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
            seconds = self._world.faults.duration(self._rank, self._clock.now, seconds)
        self._world.traffic.compute(self._rank, seconds)


_NEARLY = 1 - 1e-9
"""Factor below which a time limit counts as shorter than the default; rounding alone must not make it so."""


class _Lane:
    """Queue of a rank's asynchronous operations, which run in order in one task."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Callable[[], object], VirtualWork[object]]] = deque()
        self.last: VirtualWork[object] | None = None
        self.task: Task | None = None


class VirtualBackend(Backend):
    """Backend of one rank of a simulated world."""

    query_peers_after = math.inf  # never: the scheduler detects at once that no rank can go on

    def __init__(self, rank: int, world_size: int, world: World, timeout: float) -> None:
        super().__init__(rank, world_size, timeout)
        self.world = world
        self._scheduler = world.scheduler
        self._clock = clock = world.scheduler.clock
        self.flight_recorder = FlightRecorder(lambda: clock.now)
        world.flight_recorders[rank] = self.flight_recorder
        self._boundary = Boundary(rank, world)
        self._mailbox = world.mailboxes[rank]
        self._closed = False
        self._lanes: dict[int, _Lane] = {}
        self._num_messages = 0
        self._dies_at = world.deaths_by_op.get(rank, math.inf)

    @property
    def name(self) -> str:  # noqa: D102
        return "simulated"

    @property
    def hosts(self) -> tuple[int, ...]:
        """Number of each rank's host, from the network."""
        return self.world.hosts

    # Messages

    def isend(self, tensor: torch.Tensor, dst: int, tag: int | Tag = 0, *, note: str = "") -> Work[None]:  # noqa: D102
        tag = self.checked_send(tensor, dst, tag)
        task = self._begin_message("" if is_plain(tag) else note)
        work: VirtualWork[None] = VirtualWork(self, Passage("send to", dst, tag), dst, note, None)
        # The peer is gone, or the group revoked, as far as this rank knows by now.
        if error := self._mailbox.failure(dst, tag):
            work.complete(error=error)
        else:
            self.world.send_tensor(self.rank, dst, tensor, tag, note, work.complete)
        self._boundary.leave(task)
        return work

    def irecv(  # noqa: D102
        self,
        src: int,
        tag: int | Tag = 0,
        *,
        out: torch.Tensor | None = None,
        note: str | None = "",
        must_fit: bool = True,
        combine: Combine | None = None,
    ) -> Work[torch.Tensor]:
        tag = self.checked_receive(src, tag, out)
        plain = tag if is_plain(tag) else None
        task = self._begin_message("" if plain else note or "")
        work: VirtualWork[torch.Tensor] = VirtualWork(self, Passage("receive from", src, tag), src, note or "", plain)
        self._mailbox.post(Receive(work, src, tag, out, note, must_fit=must_fit, combine=combine))
        self._boundary.leave(task)
        return work

    def irecv_any(  # noqa: D102
        self, sources: Mapping[int, int], tag: int | Tag = 0, *, note: str | None = ""
    ) -> Work[Received]:
        tag = self.checked_receive_any(sources, tag)
        task = self._begin_message("" if is_plain(tag) else note or "")
        work = FromAny(self, note or "", tag, sources)
        self._mailbox.post(Receive(work, ANY, tag, None, note, sources))
        self._boundary.leave(task)
        return work

    def cancel(self, work: Work[torch.Tensor] | Work[Received]) -> None:  # noqa: D102
        self._mailbox.withdraw(work, Timeout(f"{work.description}: withdrawn after its time was up"))

    # Waiting

    def drive(self, work: Work[object], timeout: float | None) -> bool:
        """Blocks, in virtual time, until `work` is completed. False if the time is up before."""
        if self.is_inherited:  # the other ranks are threads, which a forked child does not have
            raise self.closed_error()
        task = self._boundary.enter()
        # The limit of a nested wait is compared from the start of the outermost call, which has the group's timeout. A
        # shorter limit is the program's own: then a timeout is a legal end, not a deadlock.
        began = task.entered_at if task.depth else self._clock.now
        deadline = math.inf if timeout is None else self._clock.now + timeout
        done = self._scheduler.wait(work, deadline, deadline - began < self.timeout * _NEARLY)
        self._boundary.leave(task)
        return done

    def poll(self, work: Work[object]) -> bool:
        """Runs all events of this instant, then returns whether `work` is completed."""
        if not self._boundary.is_running_here() or self.is_inherited:
            return False
        task = self._boundary.enter()
        done = self._scheduler.poll(work)
        self._boundary.leave(task)
        return done

    def will_wait(self) -> AbstractContextManager[object]:  # noqa: D102
        return self._boundary.will_wait()

    def now(self) -> float:
        """Returns the virtual time; see `Boundary.now`."""
        return self._boundary.now()

    def compute(self, step: object) -> AbstractContextManager[None]:
        """Marks the computation of `step`; see `Boundary.compute`."""
        return self._boundary.compute(step)

    def memory_meter(self) -> AbstractContextManager[object]:
        """Inside, the memory of new tensors is counted, if the simulation has `memory=True`."""
        meters = self.world.memory_meters
        return meters[self.rank] if meters else nullcontext()

    # Beside

    def start(self, function: Callable[[], T], description: str, lane: int = 0) -> Work[T]:  # noqa: D102
        task = self._boundary.enter()
        if self._closed:
            raise self.closed_error()
        work: VirtualWork[T] = VirtualWork(self, description, self.rank, description, None)
        # A task per lane: a lane's operations run in order, and lanes overlap.
        line = self._lanes.setdefault(lane, _Lane())
        line.jobs.append((function, work))  # type: ignore[arg-type]
        line.last = work  # type: ignore[assignment]
        place = source_of(calling_place())
        if line.task is None:
            line.task = self._scheduler.add(self.rank, partial(self._work_off, line), len(self._lanes), place)
        elif line.task.is_idle:
            self._clock.wake(line.task, line.task.turn)
        self._boundary.leave(task)
        return work

    def _work_off(self, line: _Lane) -> None:
        """Body of a lane's task. Ends when its rank is killed, or with the simulation."""
        task = self._scheduler.current()
        while True:
            while not line.jobs:
                self._scheduler.park()
            function, work = line.jobs.popleft()
            self._boundary.leave(task)
            result, error = None, None
            try:
                with self.memory_meter():
                    result = function()
            except Ended:
                raise
            except BaseException as raised:
                error = raised
            self._boundary.enter()
            work.complete(result, error)
            self._clock.wake_pollers()
            # Locals of a loop live until they are assigned again: the tensors would live until the next job.
            del function, work, result, error

    # Ending

    def close(self, timeout: float | None = None) -> None:  # noqa: D102
        if not self._closed and not self._has_ended():
            self.drain(timeout)
            self._part(self.close_reason())

    def abort(self, reason: str, origin: int | None = None) -> None:  # noqa: D102
        if not self._closed and not self._has_ended():
            failure = PeerFailed(self.rank if origin is None else origin, reason)
            self._part(failure.told_by(self.rank))

    def ask(self, ranks: Iterable[int], question: Question, timeout: float) -> dict[int, Status]:  # noqa: ARG002, D102
        return self.world.answers(set(ranks) - {self.rank}, question)

    def revoke(self, context: int, ranks: Iterable[int], failure: Failure) -> Failure:  # noqa: D102
        first = self._mailbox.fail_context(context, failure)
        told = first.told_by(self.rank)
        if not self._closed and not self._has_ended():
            for rank in sorted(set(ranks) - {self.rank}):
                self.world.tell(self.rank, rank, lambda mailbox: mailbox.fail_context(context, told))
        return first

    def drain(self, timeout: float | None = None) -> None:
        """Waits for the end of all asynchronous operations. Does not raise their errors."""
        for lane in list(self._lanes.values()):
            if lane.last is not None and not lane.last.has_ended:
                self.drive(lane.last, self.timeout if timeout is None else timeout)

    def _part(self, failure: PeerFailed) -> None:
        """Leaves the world: fails this rank's receives, and sends `failure` to all peers after its messages."""
        self._closed = True
        self.world.note(self.rank, f"leaves: {failure}")
        self._mailbox.fail_all(self.closed_error())
        for peer in range(self.world_size):
            if peer != self.rank:
                self.world.tell(self.rank, peer, lambda mailbox: mailbox.fail_peer(self.rank, failure))

    def forget(self) -> None:
        """Drops all references, after the end of the simulation."""
        self._mailbox.fail_all(self.closed_error())
        self._lanes.clear()

    # Every call

    def _has_ended(self) -> bool:
        return self._scheduler.is_ending or self.rank in self.world.killed

    def _begin_message(self, operation: str) -> Task:
        """Begins a call that sends or receives. `operation`: the collective that it is part of; empty for none.

        Raises:
            Closed: the backend is closed.
            Ended: the rank was killed, now if this is the message of `Kill(at_op=)`.
        """
        task = self._boundary.enter()
        if self._closed:
            raise self.closed_error()
        self._num_messages += 1
        # Counted at the start of the call: the rank dies before its n-th message leaves.
        if self._num_messages >= self._dies_at:
            self.world.kill(self.rank)
            raise Ended
        if operation:
            task.operation = operation
        return task

    def begin(self) -> None:
        """Starts the program of this rank: installs its random states and starts its stopwatch."""
        self._boundary.leave(self._scheduler.current())
