"""Executors of the collectives of simulated ranks: played whole, or message by message with values in rank order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from echelon.backends.collective import (
    REDUCTIONS,
    Collective,
    CollectiveExecutor,
    Run,
    UniformExecutor,
    wait_and_look,
)
from echelon.backends.delivery import ANY, disagreement
from echelon.backends.formats.wire import Tag, readable, signed
from echelon.backends.modes import overwrite
from echelon.collectives.calls.plan_executor import PlanExecutor, PlannedExecutor, choose
from echelon.collectives.plans.select import SIZED
from echelon.operation_records import OperationRecord
from echelon.simulation.backend import VirtualBackend
from echelon.simulation.boundary import Activity, Boundary, VirtualWork
from echelon.simulation.meeting import GroupMeetings, Meeting, Part
from echelon.simulation.values import Inputs, snapshot
from echelon.simulation.world import World

Collectives: TypeAlias = Literal["whole", "messages"]
"""Ways to play a collective: as one event, or message by message."""
Order: TypeAlias = Literal["shm", "tcp"]
"""Orders in which a reduction combines values: that of the ranks, or that of the algorithm's plan."""


class MeetingWork(VirtualWork[None]):
    """Wait of a rank for the end of its part in a meeting."""

    __slots__ = ("_meeting", "_rank")

    def __init__(self, boundary: Boundary, timeout: float, note: str, tag: Tag, meeting: Meeting, rank: int) -> None:
        super().__init__(boundary, Activity("collective with", ANY, tag), timeout, ANY, note, None)
        self._meeting = meeting
        self._rank = rank

    def awaited(self) -> tuple[int, ...]:  # noqa: D102
        return self._meeting.awaited_by(self._rank)


class WholeExecutor(UniformExecutor, PlannedExecutor):
    """Collectives of one group on one rank, each played as one event."""

    def __init__(self, backend: VirtualBackend, boundary: Boundary, meetings: GroupMeetings, context: int) -> None:
        self._backend = backend
        self._boundary = boundary
        self._meetings = meetings
        self._context = context
        self._rank = meetings.index[backend.rank]
        self._world = backend.world
        self._mailbox = backend.world.mailboxes[backend.rank]
        self._lines = backend.world.lines_of(context, meetings.ranks)

    def _run(self, collective: Collective, record: OperationRecord, tensor: Tensor | None, out: Tensor | None) -> Any:
        kind = "broadcast" if collective.kind == "broadcast_rows" else collective.kind
        num_bytes = collective.num_bytes if collective.kind in SIZED else 0
        algorithm, plan = choose(self.selector, kind, num_bytes, max(collective.root, 0))
        note = f"{signed(record.operation, record.sequence, record.signature)} by {algorithm}"
        with self._backend.messages.will_wait(), self._boundary.moving(), torch.no_grad():
            task = self._boundary.enter()
            if self._backend.control.is_closed:
                raise self._backend.control.closed_error()
            if len(self._meetings.ranks) > 1:  # as with messages, of which a rank alone sends none, and has no span
                task.operation = note

            def make(meetings: GroupMeetings) -> Meeting:
                return Meeting(meetings, note, self._backend.rank, collective.kind, collective.root, plan)

            self._lines.add(self._rank, collective, record)
            meeting = self._meetings.meeting(record.sequence, make)
            part = self._join(meeting, collective, record, tensor, out, note)
            self._boundary.leave(task)
            try:
                # Fast path of the rank that comes last, which need not wait.
                if part.work.has_ended:
                    part.work.result()
                else:
                    wait_and_look(part.work, ANY, record, self._backend.now)
            except BaseException:
                meeting.give_up(part)
                raise
            finally:
                self._mailbox.parts.pop(part, None)
            try:
                # The values of all ranks stand in memory of the simulation. A view of them would count as this rank's.
                with self._world.uncounted_memory(self._backend.rank):
                    result = meeting.take(part, tensor, out, record)
            finally:
                meeting.leave()
            self._world.count_memory(self._backend.rank, result)
            return result

    def _join(
        self,
        meeting: Meeting,
        collective: Collective,
        record: OperationRecord,
        tensor: Tensor | None,
        out: Tensor | None,
        note: str,
    ) -> Part:
        """Comes to a meeting. Completes the parts whose ends are reached, if this is the last rank that they need."""
        world, rank = self._world, self._backend.rank
        world.recorder.events.append((world.clock.now, rank, f"calls {readable(note)}"))
        with world.uncounted_memory(rank):
            part = meeting.join(self._rank, collective, tensor, out)
            tag = Tag(self._context, record.sequence)
            part.work = MeetingWork(self._boundary, self._backend.timeout, note, tag, meeting, self._rank)
            if error := self._mailbox.failure_of(part, self._context):
                part.work.complete(error=error)
            elif note != meeting.note:
                part.work.complete(error=disagreement(meeting.first, readable(meeting.note), readable(note)))
            else:
                self._mailbox.parts[part] = self._context
                meeting.play()
                if meeting.is_over:
                    self._meetings.end(record.sequence)
        return part


class RankOrderExecutor(PlannedExecutor):
    """Collectives of one group on one rank, played message by message. Reductions combine values in rank order."""

    def __init__(self, backend: VirtualBackend, ranks: Sequence[int], context: int) -> None:
        self._messages = PlanExecutor(backend, ranks, context)
        self._boundary = backend.boundary
        self._key = context, tuple(ranks)
        self._rank = ranks.index(backend.rank)
        self._world = backend.world
        self._world_rank = backend.rank
        self._lines = backend.world.lines_of(context, tuple(ranks))

    def prepare(self, collective: Collective) -> Run:  # noqa: D102
        self._messages.selector = self.selector
        run = self._messages.prepare(collective)
        return partial(self._run, run, collective)

    def _run(
        self, run: Run, collective: Collective, record: OperationRecord, tensor: Tensor, out: Tensor | None
    ) -> Any:
        self._lines.add(self._rank, collective, record)
        if collective.kind not in REDUCTIONS:
            return run(record, tensor, out)
        with self._boundary.moving():
            return self._reduce(run, collective, record, tensor, out)

    def _reduce(
        self, run: Run, collective: Collective, record: OperationRecord, tensor: Tensor, out: Tensor | None
    ) -> Tensor:
        inputs = self._world.inputs.setdefault((*self._key, record.sequence), Inputs(len(self._key[1])))
        with self._world.uncounted_memory(self._world_rank), torch.no_grad():
            inputs.give(self._rank, snapshot(tensor))
        result: Tensor = run(record, tensor, out)
        with torch.no_grad():
            if collective.kind == "reduce" and collective.root != self._rank:
                self._took(inputs, record)
                return result
            # A rank that has its result has got a message from every other, by way of others maybe.
            with self._world.uncounted_memory(self._world_rank):
                total = inputs.total(collective)
                if collective.kind == "reduce_scatter":
                    begin = sum(map(len, tensor.tensor_split(len(self._key[1]))[: self._rank])) * math.prod(
                        tensor.shape[1:]
                    )
                    total = total[begin : begin + result.numel()]
                overwrite(result, total.view(result.shape))
            self._took(inputs, record)
            return result

    def _took(self, inputs: Inputs, record: OperationRecord) -> None:
        inputs.num_ended += 1
        if inputs.num_ended == len(self._key[1]):
            del self._world.inputs[*self._key, record.sequence]


class WholeBackend(VirtualBackend):
    """Simulated rank whose collectives are played whole."""

    def executor(self, context: int, ranks: Sequence[int]) -> CollectiveExecutor:  # noqa: D102
        return WholeExecutor(self, self.boundary, self.world.meetings(context, tuple(ranks)), context)


class RankOrderBackend(VirtualBackend):
    """Simulated rank whose collectives are played message by message, with values in rank order."""

    def executor(self, context: int, ranks: Sequence[int]) -> CollectiveExecutor:  # noqa: D102
        return RankOrderExecutor(self, ranks, context)


def backend_of(collectives: Collectives, order: Order) -> Callable[[int, int, World, float], VirtualBackend]:
    """Returns the class of the ranks' backends."""
    if collectives == "whole":
        return WholeBackend
    return RankOrderBackend if order == "shm" else VirtualBackend
