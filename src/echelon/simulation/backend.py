"""The backend of a simulated rank: messages are events in a world with a virtual clock.

Strategy. Everything here runs in the one task whose turn it is, so nothing is locked. A send copies the tensor and
enters its arrival in the world's queue of events; a wait gives the turn away until the Work is completed. A rank's
own task and its lanes are tasks of the scheduler alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

import torch

from echelon.backends.base import Backend
from echelon.backends.delivery import ANY, Receive
from echelon.backends.operators import Combine
from echelon.backends.status import Question, Status
from echelon.backends.tag import Tag
from echelon.backends.work import Received, Work
from echelon.errors import Failure, PeerFailed, Timeout
from echelon.flights import FlightRecorder
from echelon.places import calling_place, source_of
from echelon.simulation.boundary import Boundary
from echelon.simulation.task import Ended, Task
from echelon.simulation.work import FromAny, Passage, VirtualWork
from echelon.simulation.world import World, is_plain

T = TypeVar("T")

_NEARLY = 1 - 1e-9
"""A time limit counts as the default if rounding alone makes it shorter."""


class _Lane:
    """What is to be done beside a rank's own task, in order."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Callable[[], object], VirtualWork[object]]] = deque()
        self.last: VirtualWork[object] | None = None
        self.task: Task | None = None


class VirtualBackend(Backend):
    """One rank of a simulated world."""

    doubts_after = math.inf  # when no rank can go on, that is noticed at once

    def __init__(self, rank: int, world_size: int, world: World, timeout: float) -> None:
        super().__init__(rank, world_size, timeout)
        self.world = world
        self._scheduler = world.scheduler
        self.flight_recorder = FlightRecorder(lambda: world.scheduler.now)
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
        """The host of each rank, by number, as the network has them."""
        return self.world.hosts

    # Messages

    def isend(self, tensor: torch.Tensor, dst: int, tag: int | Tag = 0, *, note: str = "") -> Work[None]:  # noqa: D102
        tag = self.checked_send(tensor, dst, tag)
        task = self._begin_message("" if is_plain(tag) else note)
        work: VirtualWork[None] = VirtualWork(self, Passage("send to", dst, tag), dst, note, None)
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

    def took(self, src: int, tag: Tag) -> None:
        """Says that the program has what a message brought: what it computes next needed it."""
        self.world.recorder.took(self.rank, src, tag)

    # Waiting

    def drive(self, work: Work[object], timeout: float | None) -> bool:
        """Lets the others go on until `work` is completed; returns False when the time is up."""
        if self.is_inherited:  # the others are threads, which a forked child does not have
            raise self.closed_error()
        task = self._boundary.enter()
        began = task.entered_at if task.depth else self._scheduler.now
        deadline = math.inf if timeout is None else self._scheduler.now + timeout
        done = self._scheduler.wait(work, deadline, deadline - began < self.timeout * _NEARLY)
        self._boundary.leave(task)
        return done

    def poll(self, work: Work[object]) -> bool:
        """Lets the others go on with what can happen now; says whether `work` is completed then."""
        if not self._scheduler.is_running_here() or self.is_inherited:
            return False
        task = self._boundary.enter()
        done = self._scheduler.poll(work)
        self._boundary.leave(task)
        return done

    def attend(self) -> AbstractContextManager[object]:  # noqa: D102
        return self._boundary.attend()

    def now(self) -> float:
        """Returns the virtual time; see `Boundary.now`."""
        return self._boundary.now()

    def compute(self, step: object) -> AbstractContextManager[None]:
        """Lets the time pass that `step` costs, and adds it to the timeline; steps inside of others are not counted."""
        return self._boundary.compute(step)

    def memory_meter(self) -> AbstractContextManager[object]:
        """Counts the memory of the tensors that are made inside, if that was asked for."""
        meters = self.world.memory_meters
        return meters[self.rank] if meters else nullcontext()

    # Beside

    def start(self, function: Callable[[], T], description: str, lane: int = 0) -> Work[T]:  # noqa: D102
        task = self._boundary.enter()
        if self._closed:
            raise self.closed_error()
        work: VirtualWork[T] = VirtualWork(self, description, self.rank, description, None)
        line = self._lanes.setdefault(lane, _Lane())
        line.jobs.append((function, work))  # type: ignore[arg-type]
        line.last = work  # type: ignore[assignment]
        place = source_of(calling_place())
        if line.task is None:
            line.task = self._scheduler.add(self.rank, partial(self._work_off, line), len(self._lanes), place)
        else:
            self._scheduler.rouse(line.task)
        self._boundary.leave(task)
        return work

    def _work_off(self, line: _Lane) -> None:
        """The body of a lane's task. Ends when its rank is killed, or with the simulation."""
        task = self._scheduler.current()
        while True:
            while not line.jobs:
                self._scheduler.rest()
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
            self._scheduler.stir()
            del function, work, result, error  # and with them the tensors, which would live until the next job

    # Ending

    def close(self, timeout: float | None = None) -> None:  # noqa: D102
        if not self._closed and not self._has_ended():
            self.drain(timeout)
            self._part(self.farewell())

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
        """Waits for what was started beside; whether it succeeds does not matter."""
        for lane in list(self._lanes.values()):
            if lane.last is not None and not lane.last.has_ended:
                self.drive(lane.last, self.timeout if timeout is None else timeout)

    def _part(self, failure: PeerFailed) -> None:
        """Leaves the world: nothing more is sent or received."""
        self._closed = True
        self.world.note(self.rank, f"leaves: {failure}")
        self._mailbox.fail_all(self.closed_error())
        for peer in range(self.world_size):
            if peer != self.rank:
                self.world.tell(self.rank, peer, lambda mailbox: mailbox.fail_peer(self.rank, failure))

    def forget(self) -> None:
        """Lets go of everything, after the end of the simulation."""
        self._mailbox.fail_all(self.closed_error())
        self._lanes.clear()

    # Every call

    def _has_ended(self) -> bool:
        return self._scheduler.is_ending or self.rank in self.world.killed

    def _begin_message(self, operation: str) -> Task:
        """Begins a call that sends or receives, as part of a collective if that is given."""
        task = self._boundary.enter()
        if self._closed:
            raise self.closed_error()
        self._num_messages += 1
        if self._num_messages >= self._dies_at:
            self.world.kill(self.rank)
            raise Ended
        if operation:
            task.operation = operation
        return task

    def begin(self) -> None:
        """Begins the program of this rank, in its own task."""
        self._boundary.leave(self._scheduler.current())
