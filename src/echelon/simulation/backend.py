"""Backend of a simulated rank: messages are events in a world with a virtual clock.

Strategy. All code here runs in the one task that has the turn, so nothing is locked. A send copies the tensor and puts
its arrival into the world's event queue. A wait passes the turn on until the Work is completed. A rank's main task and
its lanes are both tasks of the scheduler.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from echelon._torch_private.modules import never_compiled
from echelon.backends.base import Backend, check_rank
from echelon.backends.control import ControlPlane
from echelon.backends.delivery import ANY, Receive
from echelon.backends.formats.wire import Tag, readable
from echelon.backends.lanes import Lanes
from echelon.backends.messages import Messages
from echelon.backends.operators import Combine
from echelon.backends.status import Question, Status
from echelon.backends.work import Received, Work
from echelon.call_site import Place, calling_place
from echelon.errors import DeadlockError, Failure, PeerFailed, Timeout, inherited_error
from echelon.operation_records import FlightRecorder
from echelon.simulation.scheduler import Ended, Task
from echelon.simulation.world import World, is_plain

T = TypeVar("T")


SEND = "send to"


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
        result = super().wait(timeout)
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
        super().__init__(boundary, Passage("receive from", ANY, tag), timeout, ANY, operation, plain)
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


class VirtualControl(ControlPlane):
    """Control plane of a simulated rank: news are events of the world, and arrive after the messages sent before."""

    def __init__(self, rank: int, world_size: int, world: World) -> None:
        super().__init__(rank, world_size, FlightRecorder(lambda: world.scheduler.clock.now), world.hosts)
        self.is_closed = False
        self._world = world
        self._mailbox = world.mailboxes[rank]
        world.flight_recorders[rank] = self.recorder

    @property
    def has_left(self) -> bool:
        """Whether the rank has closed, was killed, or the simulation ends."""
        return self.is_closed or self._world.scheduler.is_ending or self.rank in self._world.killed

    def close(self, timeout: float) -> None:  # noqa: ARG002, D102
        if not self.has_left:
            self._part(self.close_reason())

    def abort(self, reason: str, origin: int | None = None) -> None:  # noqa: D102
        if not self.has_left:
            failure = PeerFailed(self.rank if origin is None else origin, reason)
            self._part(failure.told_by(self.rank))

    def ask(  # noqa: D102
        self,
        ranks: Iterable[int],
        question: Question,
        timeout: float,  # noqa: ARG002
        until: Work[Any] | None = None,  # noqa: ARG002
    ) -> dict[int, Status]:
        return self._world.answers(set(ranks) - {self.rank}, question)

    def separation(self, ranks: Collection[int]) -> str:  # noqa: D102
        return self._world.faults.separation(ranks, self._world.clock.now)

    def revoke(self, context: int, ranks: Iterable[int], failure: Failure) -> Failure:  # noqa: D102
        first = self._mailbox.fail_context(context, failure)
        told = first.told_by(self.rank)
        if not self.has_left:
            for rank in sorted(set(ranks) - {self.rank}):
                self._world.tell(self.rank, rank, lambda mailbox: mailbox.fail_context(context, told))
        return first

    def forget(self) -> None:
        """Drops all receives, after the end of the simulation."""
        self._mailbox.fail_all(self.closed_error())

    def _part(self, failure: PeerFailed) -> None:
        """Leaves the world: fails this rank's receives, and sends `failure` to all peers after its messages."""
        self.is_closed = True
        self._world.note(self.rank, f"leaves: {failure}")
        self._mailbox.fail_all(self.closed_error())
        for peer in range(self.world_size):
            if peer != self.rank:
                self._world.tell(self.rank, peer, lambda mailbox: mailbox.fail_peer(self.rank, failure))


class VirtualMessages(Messages):
    """Sends and receives of a simulated rank."""

    def __init__(self, control: VirtualControl, world: World, boundary: Boundary, timeout: float) -> None:
        super().__init__(control.rank, control.world_size, timeout)
        self._control = control
        self._world = world
        self._boundary = boundary
        self._mailbox = world.mailboxes[self.rank]
        self._death = world.deaths_by_op.get(self.rank)
        self._dies_at = math.inf if self._death is None else self._death.at_op or math.inf

    def isend(self, tensor: torch.Tensor, dst: int, tag: int | Tag = 0, *, note: str = "") -> Work[None]:  # noqa: D102
        self.check_send(tensor, dst)
        tag = Tag.of(tag)
        task = self._begin("" if is_plain(tag) else note)
        passage = Passage(SEND, dst, tag)
        work: VirtualWork[None] = VirtualWork(self._boundary, passage, self.timeout, dst, note, None)
        # The peer is gone, or the group revoked, as far as this rank knows by now.
        if error := self._mailbox.failures.of(dst, tag):
            work.complete(error=error)
        else:
            self._world.send_tensor(
                self.rank, dst, tensor, tag, note, self._world.end_of_send(self.rank, dst, tag, work)
            )
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
        self.check_receive((src,), out)
        tag = Tag.of(tag)
        plain = tag if is_plain(tag) else None
        task = self._begin("" if plain else note or "")
        passage = Passage("receive from", src, tag)
        work: VirtualWork[torch.Tensor] = VirtualWork(self._boundary, passage, self.timeout, src, note or "", plain)
        self._mailbox.post(Receive(work, src, tag, out, note, must_fit=must_fit, combine=combine))
        self._boundary.leave(task)
        return work

    def irecv_any(  # noqa: D102
        self, sources: Mapping[int, int], tag: int | Tag = 0, *, note: str | None = ""
    ) -> Work[Received]:
        self.check_receive(sources)
        tag = Tag.of(tag)
        task = self._begin("" if is_plain(tag) else note or "")
        work = FromAny(self._boundary, self.timeout, note or "", tag, sources)
        self._mailbox.post(Receive(work, ANY, tag, None, note, sources))
        self._boundary.leave(task)
        return work

    def cancel(self, work: Work[torch.Tensor] | Work[Received]) -> None:  # noqa: D102
        self._mailbox.withdraw(work, Timeout(f"{work.description}: withdrawn after its timeout"))

    def will_wait(self) -> AbstractContextManager[object]:  # noqa: D102
        return self._boundary.will_wait()

    def _begin(self, operation: str) -> Task:
        """Begins a call that sends or receives. `operation`: the collective that it is part of; empty for none.

        Raises:
            Closed: the backend is closed.
            Ended: the rank was killed, now if this is the message of `Kill(at_op=)`.
        """
        task = self._boundary.enter()
        if self._control.is_closed:
            self._boundary.leave(task)
            raise self._control.closed_error()
        num_messages = self._world.num_messages
        num_messages[self.rank] += 1
        # Counted at the start of the call: the rank dies before its n-th message leaves.
        if self._death is not None and num_messages[self.rank] >= self._dies_at and self._world.kill(self._death):
            raise Ended
        if operation:
            task.operation = operation
        return task


class _LaneWork(VirtualWork[T]):
    """Operation of a lane."""

    __slots__ = ("_lanes",)

    def __init__(self, lanes: VirtualLanes, boundary: Boundary, description: str, timeout: float, rank: int) -> None:
        super().__init__(boundary, description, timeout, rank, description, None)
        self._lanes = lanes

    def ends_within(self, seconds: float) -> bool:
        """Blocks until the operation ends; see `Work.ends_within`. A lane's own task runs its queue meanwhile."""
        self._lanes.run_own_queue(self)
        return super().ends_within(seconds)


class _Lane:
    """Queue of a rank's asynchronous operations, which run in order in one task."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Callable[[], object], VirtualWork[object], Place | None]] = deque()
        self.last: VirtualWork[object] | None = None
        self.task: Task | None = None


class VirtualLanes(Lanes):
    """Lanes of a simulated rank, each a task of the scheduler."""

    progress_by_themselves = False

    def __init__(self, control: VirtualControl, world: World, boundary: Boundary, timeout: float) -> None:
        self._control = control
        self._world = world
        self._boundary = boundary
        self._scheduler = world.scheduler
        self._timeout = timeout
        self._lanes: dict[int, _Lane] = {}

    def start(self, function: Callable[[], T], description: str, lane: int = 0) -> Work[T]:  # noqa: D102
        task, rank = self._boundary.enter(), self._control.rank
        if self._control.is_closed:
            self._boundary.leave(task)
            raise self._control.closed_error()
        work: _LaneWork[T] = _LaneWork(self, self._boundary, description, self._timeout, rank)
        # A task per lane: a lane's operations run in order, and lanes overlap.
        queue = self._lanes.setdefault(lane, _Lane())
        queue.jobs.append((function, work, calling_place()))  # type: ignore[arg-type]
        queue.last = work  # type: ignore[assignment]
        if queue.task is None:
            queue.task = self._scheduler.add(rank, partial(self._work_off, queue), len(self._lanes))
        elif queue.task.is_idle:
            self._scheduler.clock.wake(queue.task, queue.task.turn)
        self._boundary.leave(task)
        return work

    def wait_of(self, description: str) -> VirtualWork[None]:
        """Returns a Work that the caller completes. A lane's own task that waits for it runs its queue meanwhile."""
        return _LaneWork(self, self._boundary, description, self._timeout, self._control.rank)

    def run_own_queue(self, work: VirtualWork[T]) -> None:
        """Runs the queue of the lane whose task calls, until `work` has ended. Does nothing for other tasks.

        A callback of an operation may wait for a later one of its lane.
        """
        task = self._scheduler.running
        for queue in self._lanes.values():
            if queue.task is task:
                while queue.jobs and not work.has_ended:
                    self._run_next(queue)

    def _work_off(self, queue: _Lane) -> None:
        """Body of a lane's task. Ends when its rank is killed, or with the simulation."""
        while True:
            while not queue.jobs:
                self._scheduler.park()
            self._run_next(queue)

    def _run_next(self, queue: _Lane) -> None:
        """Runs the first operation of a lane's queue, in the lane's task."""
        task = self._scheduler.current()
        function, work, task.origin = queue.jobs.popleft()
        self._boundary.leave(task)
        result, error = None, None
        try:
            with self._world.memory_meter(self._control.rank):
                result = function()
        except Ended:
            raise
        except BaseException as raised:
            error = raised
        self._boundary.enter()
        work.complete(result, error)
        # The end of a task's operation is no event, after which the clock would wake them.
        self._scheduler.clock.wake_pollers()

    def close(self, timeout: float) -> None:
        """Waits for the end of all asynchronous operations. Does not raise their errors."""
        for lane in list(self._lanes.values()):
            if lane.last is not None and not lane.last.has_ended:
                self._boundary.drive(lane.last, timeout)

    def forget(self) -> None:
        """Drops all operations, after the end of the simulation."""
        self._lanes.clear()


class VirtualBackend(Backend):
    """Backend of one rank of a simulated world."""

    query_peers_after = math.inf  # never: the scheduler detects at once that no rank can go on
    control: VirtualControl
    lanes: VirtualLanes

    def __init__(self, rank: int, world_size: int, world: World, timeout: float) -> None:
        check_rank(rank, world_size)
        self.world = world
        self.boundary = boundary = Boundary(rank, world, timeout)
        control = VirtualControl(rank, world_size, world)
        messages = VirtualMessages(control, world, boundary, timeout)
        super().__init__(messages, control, VirtualLanes(control, world, boundary, timeout))

    @property
    def name(self) -> str:  # noqa: D102
        return "simulated"

    def now(self) -> float:
        """Returns the virtual time; see `Boundary.now`."""
        return self.boundary.now()

    def compute(self, step: object) -> AbstractContextManager[None]:
        """Marks the computation of `step`; see `Boundary.compute`."""
        return self.boundary.compute(step)

    def drain(self, timeout: float | None = None) -> None:
        """Waits for the end of all asynchronous operations. Does not raise their errors."""
        self.lanes.close(self.timeout if timeout is None else timeout)

    def close(self, timeout: float | None = None) -> None:  # noqa: D102
        if not self.control.has_left:
            self.drain(timeout)  # first: what they send arrives before the news that this rank has left
            self.control.close(0.0)

    def abort(self, reason: str, origin: int | None = None) -> None:  # noqa: D102
        self.control.abort(reason, origin)

    def forget(self) -> None:
        """Drops all references, after the end of the simulation."""
        self.control.forget()
        self.lanes.forget()

    def begin(self) -> None:
        """Starts the program of this rank: installs its state of the process and starts its stopwatch."""
        self.boundary.begin()
