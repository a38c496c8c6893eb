"""Interpreter of plans: runs one rank's rounds over point-to-point messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from echelon.backends.base import Backend
from echelon.backends.formats.wire import Tag
from echelon.backends.operators import Combine
from echelon.backends.work import Work
from echelon.collectives.calls.chunks import Chunks
from echelon.collectives.calls.hang_diagnosis import HangDiagnosis
from echelon.collectives.plans.plan import Copy, Plan, Recv, Reduce, Round, Send
from echelon.collectives.plans.select import Selector
from echelon.errors import Timeout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Channel:
    """Channel of one collective: its backend, ranks, tag and note."""

    backend: Backend
    ranks: Sequence[int]
    """The backend's rank of each rank of the plan."""
    rank: int
    context: int
    sequence: int
    note: str
    deadline: float
    """Point in the backend's time."""
    selector: Selector
    """Selector of the algorithm."""
    watch: HangDiagnosis
    """Diagnosis of a long wait."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the plan."""
        return len(self.ranks)

    def by(self, algorithm: str) -> Channel:
        """Returns this channel with the algorithm in its note, so that ranks compare that as well."""
        note = f"{self.note} by {algorithm}"
        return Channel(
            self.backend,
            self.ranks,
            self.rank,
            self.context,
            self.sequence,
            note,
            self.deadline,
            self.selector,
            self.watch,
        )

    def wait(self, work: Work[T], peer: int) -> T:
        """Blocks until a message from or to rank `peer` of the backend is done. Diagnoses a wait that takes long.

        Raises:
            Timeout: the deadline has passed.
            CollectiveMismatch: the peer makes other calls than this rank.
            EchelonError: the message failed.
        """
        # Fast path of a message that is done already.
        if work.has_ended:
            return work.result()
        while True:
            try:
                return work.wait(max(0.0, min(self.deadline, self.watch.next_check_at) - self.backend.now()))
            except Timeout:
                if self.backend.now() >= self.deadline:
                    raise
                # Only the time of the next check has come, not the deadline.
                self.watch.look(peer, work.is_completed)


_COMING = (Recv, Reduce)


def run(plan: Plan, channel: Channel, chunks: Chunks, combine: Combine | None = None) -> None:
    """Runs this rank's part of a plan. Blocks until it is done.

    Args:
        plan: The plan.
        channel: Channel to the other ranks.
        chunks: This rank's chunks; changed.
        combine: Operator of Reduce steps.

    Raises:
        Timeout, PeerFailed, CollectiveMismatch, SizeMismatch: the plan could not be finished.
    """
    tag = Tag(channel.context, channel.sequence)
    # This thread polls for its own messages, so the background thread need not wake.
    with channel.backend.messages.will_wait():
        for steps in plan.rounds[channel.rank]:
            _run_round(steps, channel, tag, chunks, combine)


def _run_round(steps: Round, channel: Channel, tag: Tag, chunks: Chunks, combine: Combine | None) -> None:
    backend, ranks, note, must_fit = channel.backend, channel.ranks, channel.note, chunks.sizes_are_known
    leaving = [step for step in steps if isinstance(step, Send)]
    coming = [step for step in steps if isinstance(step, _COMING)]
    busy = {chunk for step in leaving for chunk in step.chunks}
    # Receives are posted before anything is sent, so that messages of fast peers go straight to their buffers.
    hows = [_in_order(step, combine) if chunks.combines_in_place else None for step in coming]
    receives = [
        [
            backend.messages.irecv(ranks[step.peer], tag, out=place, note=note, must_fit=must_fit, combine=how)
            for place in chunks.places(step, busy)
        ]
        for step, how in zip(coming, hows, strict=True)
    ]
    sends = [
        (backend.messages.isend(part, ranks[step.peer], tag, note=note), ranks[step.peer])
        for step in leaving
        for part in chunks.outgoing(step)
    ]
    for step in steps:
        if isinstance(step, Copy):
            chunks.copy(step)
    for step, works in zip(coming, receives, strict=True):
        came = [channel.wait(work, ranks[step.peer]) for work in works]
        # `keep` may overwrite a chunk that is still being sent, so the sends must end first.
        if not busy.isdisjoint(step.chunks):
            _finish(sends, channel)
        chunks.keep(step, came, combine)
    _finish(sends, channel)


def _in_order(step: Recv | Reduce, combine: Combine | None) -> Combine | None:
    """Returns the operator of a step, with own and received values in the order that it demands. None for Recv."""
    if isinstance(step, Recv):
        return None
    assert combine is not None, "a plan with Reduce steps needs an operator"
    if not step.received_first:
        return combine

    def received_first(own: torch.Tensor, other: torch.Tensor) -> None:
        combine(other, own)
        own.copy_(other)

    return received_first


def _finish(sends: list[tuple[Work[None], int]], channel: Channel) -> None:
    for work, dst in sends:
        channel.wait(work, dst)
    sends.clear()
