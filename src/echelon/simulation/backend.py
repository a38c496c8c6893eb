"""Backend of a simulated rank: messages are events in a world with a virtual clock.

Strategy. As at the boundary, all code here runs in the one task that has the turn. A send copies the tensor and puts
its arrival into the world's event queue.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch

from echelon.backends.base import Backend, check_rank
from echelon.backends.control import ControlPlane
from echelon.backends.delivery import ANY, Receive
from echelon.backends.formats.wire import Tag
from echelon.backends.lanes import Lanes
from echelon.backends.memory import plain
from echelon.backends.messages import Messages
from echelon.backends.operators import Combine
from echelon.backends.status import Question, Status
from echelon.backends.work import Received, Work
from echelon.call_site import Place, calling_place
from echelon.errors import Failure, PeerFailed, Timeout
from echelon.operation_records import FlightRecorder
from echelon.simulation.boundary import SEND, Activity, Boundary, FromAny, VirtualWork
from echelon.simulation.scheduler import Ended, Task
from echelon.simulation.world import World, have_equal_bits, is_plain

T = TypeVar("T")


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
        activity = Activity(SEND, dst, tag)
        work: VirtualWork[None] = VirtualWork(self._boundary, activity, self.timeout, dst, note, None)
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
        activity = Activity("receive from", src, tag)
        work: VirtualWork[torch.Tensor] = VirtualWork(self._boundary, activity, self.timeout, src, note or "", plain)
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

    def cancel(self, work: Work[Any]) -> None:  # noqa: D102
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

    __slots__ = ("_lanes", "copies")

    def __init__(self, lanes: VirtualLanes, boundary: Boundary, description: str, timeout: float, rank: int) -> None:
        super().__init__(boundary, description, timeout, rank, description, None)
        self._lanes = lanes
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Its tensors, and copies of them from the time of the call, if they are compared."""

    def ends_within(self, seconds: float) -> bool:
        """Blocks until the operation ends; see `Work.ends_within`. A lane's own task runs its queue meanwhile."""
        self._lanes.run_own_queue(self)
        return super().ends_within(seconds)

    def uses(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies the tensors with `late_sends`, so that they are compared when the operation begins."""
        self._lanes.copy(self, tensors)


class _Lane:
    """Queue of a rank's asynchronous operations, which run in order in one task."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Callable[[], object], _LaneWork[object], Place | None]] = deque()
        self.under_way: list[_LaneWork[object]] = []
        """Operations that have begun and not ended: several if one waits for later ones."""
        self.last: _LaneWork[object] | None = None
        self.task: Task | None = None

    @property
    def not_ended(self) -> list[_LaneWork[object]]:
        """Operations that have not ended."""
        return [*self.under_way, *(work for _, work, _ in self.jobs)]


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

    def copy(self, work: _LaneWork[T], tensors: Sequence[torch.Tensor]) -> None:
        """Copies the tensors of an operation that was just queued, if the simulation has `late_sends`."""
        if not self._world.late_sends or work.has_ended:
            return
        queue = next((each for each in self._lanes.values() if each.last is work), None)
        if queue is None:  # the lane goes on to a later call
            return
        # An operation before this one may change them: in a lane that is its order.
        before = {_memory(each) for other in queue.not_ended if other is not work for each, _ in other.copies}
        # By their places: one that is overwritten is given twice.
        own = {(each.data_ptr(), each.shape): each.detach() for each in tensors if _memory(each) not in before}
        work.copies = [(each, plain(each).clone()) for each in own.values()]

    def _begin_late(self, work: _LaneWork[object]) -> None:
        """Waits until no rank can go on otherwise. Ends the simulation if a tensor has changed since the call."""
        rank = self._control.rank
        last: VirtualWork[object] = VirtualWork(self._boundary, work.description, self._timeout, rank, "", None)
        clock = self._scheduler.clock
        clock.at(clock.now, last.complete, clock.draw() + 1)  # all other draws are below 1
        self._boundary.drive(last, None)
        # A rank whose group has failed waits for its operations no longer.
        has_failed = self._world.mailboxes[rank].failures.has_any
        if not has_failed and not all(have_equal_bits(plain(each), before) for each, before in work.copies):
            self._world.fail_changed(rank, str(work.description))

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
        queue.under_way.append(work)
        self._boundary.leave(task)
        result, error = None, None
        try:
            if work.copies:
                self._begin_late(work)
            with self._world.memory_meter(self._control.rank):
                result = function()
        except Ended:
            raise
        except BaseException as raised:
            error = raised
        self._boundary.enter()
        queue.under_way.remove(work)
        work.copies.clear()
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


def _memory(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


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
