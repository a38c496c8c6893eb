"""Interpreter of plans: runs one rank's rounds over point-to-point messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from echelon.backends.base import Backend
from echelon.backends.collective import wait_and_look
from echelon.backends.formats.wire import Tag, signed
from echelon.backends.operators import Combine
from echelon.backends.work import Work
from echelon.collectives.calls.chunks import Chunks, in_order
from echelon.collectives.plans.plan import Copy, Plan, Recv, Reduce, Send
from echelon.collectives.plans.select import Selector
from echelon.operation_records import OperationRecord

T = TypeVar("T")


class Channel:
    """Channel of one collective: its backend, ranks, tag and note."""

    __slots__ = ("backend", "note", "num_ranks", "rank", "ranks", "record", "selector", "tag")

    def __init__(
        self,
        backend: Backend,
        ranks: Sequence[int],
        rank: int,
        context: int,
        record: OperationRecord,
        selector: Selector,
    ) -> None:
        """Sends nothing yet.

        Args:
            backend: Transport of the messages.
            ranks: The backend's rank of each rank of the plan.
            rank: This rank of the plan.
            context: Context of the group.
            record: The collective.
            selector: Selector of its algorithm.
        """
        self.backend = backend
        self.ranks = ranks
        self.rank = rank
        self.num_ranks = len(ranks)
        self.selector = selector
        self.tag = Tag(context, record.sequence)
        self.note = signed(record.operation, record.sequence, record.signature)
        """Text that ranks compare with every message."""
        self.record = record

    def wait(self, work: Work[T], peer: int) -> T:
        """Blocks until a message from or to rank `peer` of the backend is done. Diagnoses a wait that takes long.

        Raises:
            Timeout: the collective's deadline has passed.
            CollectiveMismatch: the peer makes other calls than this rank.
            EchelonError: the message failed.
        """
        # Fast path of a message that is done already.
        if work.has_ended:
            return work.result()
        return wait_and_look(work, peer, self.record, self.backend.now)


class _Round(NamedTuple):
    """Round of one rank, its steps by kind."""

    sends: tuple[Send, ...]
    coming: tuple[Recv | Reduce, ...]
    copies: tuple[Copy, ...]
    busy: frozenset[int]
    """Chunks that are being sent."""


_MAX_KNOWN = 4096
_known: dict[tuple[int, int], tuple[Plan, tuple[_Round, ...]]] = {}


def rounds_of(plan: Plan, rank: int) -> tuple[_Round, ...]:
    """Returns a rank's rounds. Cached by identity: to hash a plan takes longer than to run a small one."""
    found = _known.get((id(plan), rank))
    if found is None:
        rounds = []
        for steps in plan.rounds[rank]:
            sends = tuple(step for step in steps if isinstance(step, Send))
            coming = tuple(step for step in steps if isinstance(step, Recv | Reduce))
            copies = tuple(step for step in steps if isinstance(step, Copy))
            rounds.append(_Round(sends, coming, copies, frozenset(chunk for step in sends for chunk in step.chunks)))
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        # The plan is kept with them, so that its identity stays its own.
        found = _known[id(plan), rank] = plan, tuple(rounds)
    return found[1]


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
    # This thread polls for its own messages, so the background thread need not wake.
    with channel.backend.messages.will_wait():
        for steps in rounds_of(plan, channel.rank):
            _run_round(steps, channel, chunks, combine)


def _run_round(steps: _Round, channel: Channel, chunks: Chunks, combine: Combine | None) -> None:
    backend, ranks, tag, note, busy = channel.backend, channel.ranks, channel.tag, channel.note, steps.busy
    must_fit = chunks.sizes_are_known
    # Receives are posted before anything is sent, so that messages of fast peers go straight to their buffers.
    receives = []
    for step in steps.coming:
        how = in_order(step, combine) if chunks.combines_in_place and isinstance(step, Reduce) else None
        works = []
        for place in chunks.places(step, busy):
            works.append(
                backend.messages.irecv(ranks[step.peer], tag, out=place, note=note, must_fit=must_fit, combine=how)
            )
        receives.append((step, works))
    sends: list[tuple[Work[None], int]] = []
    for leaving in steps.sends:
        dst = ranks[leaving.peer]
        for part in chunks.outgoing(leaving):
            sends.append((backend.messages.isend(part, dst, tag, note=note), dst))
    for copy in steps.copies:
        chunks.copy(copy)
    for step, works in receives:
        src = ranks[step.peer]
        came = []
        for work in works:
            came.append(channel.wait(work, src))
        # `keep` may overwrite a chunk that is still being sent, so the sends must end first.
        if not busy.isdisjoint(step.chunks):
            _finish(sends, channel)
        chunks.keep(step, came, combine)
    _finish(sends, channel)


def _finish(sends: list[tuple[Work[None], int]], channel: Channel) -> None:
    for work, dst in sends:
        channel.wait(work, dst)
    sends.clear()
