"""Ranks of one host over shared memory, and ranks of other hosts over TCP.

Strategy. A `TcpBackend` connects all ranks: it finds and proves them, carries messages, and tells who died, left or
gave up. The ranks of one host share a segment besides, in which groups of them do their collectives. While a rank waits
there, it polls the connections every 20 ms, so what is told over them ends its wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from echelon.backends.base import Backend, Received, Tag, Work
from echelon.backends.members import machine_id
from echelon.backends.native import Call, NativeCollectives
from echelon.backends.operators import Combine
from echelon.backends.shared import layout
from echelon.backends.shared.board import Board
from echelon.backends.shared.collectives import SharedCollectives
from echelon.backends.shared.meeting import Unshared, meet
from echelon.backends.shared.segment import Segment, Window
from echelon.backends.shared.waiting import Waiter
from echelon.backends.status import Question, Status
from echelon.backends.tcp import TcpBackend
from echelon.errors import Failure, LaunchError, Timeout

T = TypeVar("T")

logger = logging.getLogger("echelon")

_REGION_SEQUENCE = (1 << 64) - 1
"""Of the message that says where a group's region is."""


class SharedMemoryBackend(Backend):
    """Moves CPU tensors between processes of one host through memory that they share, and else over TCP."""

    def __init__(self, tcp: TcpBackend, local_ranks: Sequence[int], segment: Segment) -> None:
        """Takes over a backend that is connected, and the segment that these ranks share; `connect` makes both."""
        super().__init__(tcp.rank, tcp.world_size, tcp.timeout)
        self._tcp = tcp
        self.flight_recorder = tcp.flight_recorder
        self._local_ranks = frozenset(local_ranks)
        self.segment = segment
        """What the ranks of this host share."""
        self.waiter = Waiter(len(local_ranks))
        """How this rank waits."""

    @property
    def name(self) -> str:  # noqa: D102
        return "shm"

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of each rank, by number: ranks share one that can see each other's processes."""
        return self._tcp.hosts

    def __repr__(self) -> str:
        state = ", closed" if self._tcp.is_closed else ""
        return f"<SharedMemoryBackend: rank {self.rank} of {self.world_size}, {len(self._local_ranks)} here{state}>"

    # Collectives

    def native_collectives(self, context: int, ranks: Sequence[int]) -> NativeCollectives | None:  # noqa: D102
        if len(ranks) < 2 or not self._local_ranks.issuperset(ranks):
            return None
        return SharedCollectives(self, context, tuple(ranks), list(ranks).index(self.rank))

    def check(self, context: int) -> None:
        """Raises Closed or PeerFailed if the group cannot begin an operation."""
        if self._tcp.is_closed:
            raise self.closed_error()
        if error := self._tcp.revoked(context):
            raise error

    def look_around(self, call: Call, context: int, rank: int | None, board: Board | None) -> None:
        """Raises why this rank need not wait longer: what it was told, a rank's end, or that its time is up."""
        self._tcp.glance()
        if board is not None and (disagreement := board.disagreement()):
            raise disagreement
        if error := self._tcp.failure(self.rank if rank is None else rank, context):
            raise error
        if self.now() >= call.deadline:
            missing = ", ".join(f"rank {rank}" for rank in board.missing()) if board is not None else ""
            raise Timeout(f"its time is up, {missing or 'no rank'} has not come")

    def map_region(self, call: Call, context: int, ranks: tuple[int, ...]) -> Window:
        """Returns the region of a group, which its first rank gives out and tells the others about."""
        size = len(ranks) * layout.ROOM_BYTES
        tag = Tag(context, _REGION_SEQUENCE)
        first, *others = ranks
        if self.rank == first:
            offset = self.segment.allocate(size)
            for rank in others:
                self._tcp.send(torch.tensor([offset], device="cpu"), rank, tag, call.deadline - time.monotonic())
        else:
            offset = int(self._tcp.recv(first, tag, timeout=call.deadline - time.monotonic()).item())
        return self.segment.map(offset, size)

    # Messages

    def isend(self, tensor: torch.Tensor, dst: int, tag: int | Tag = 0, *, note: str = "") -> Work[None]:  # noqa: D102
        return self._tcp.isend(tensor, dst, tag, note=note)

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
        return self._tcp.irecv(src, tag, out=out, note=note, must_fit=must_fit, combine=combine)

    def irecv_any(  # noqa: D102
        self, sources: Mapping[int, int], tag: int | Tag = 0, *, note: str | None = ""
    ) -> Work[Received]:
        return self._tcp.irecv_any(sources, tag, note=note)

    def cancel(self, work: Work[torch.Tensor] | Work[Received]) -> None:  # noqa: D102
        self._tcp.cancel(work)

    def start(self, function: Callable[[], T], description: str, lane: int = 0) -> Work[T]:  # noqa: D102
        return self._tcp.start(function, description, lane)

    def attend(self) -> AbstractContextManager[object]:  # noqa: D102
        return self._tcp.attend()

    # Where the others are

    def ask(self, ranks: Iterable[int], question: Question, timeout: float) -> dict[int, Status]:  # noqa: D102
        return self._tcp.ask(ranks, question, timeout)

    def last_heard(self, rank: int) -> str:  # noqa: D102
        return self._tcp.last_heard(rank)

    # The end

    def revoke(self, context: int, ranks: Iterable[int], failure: Failure) -> Failure:  # noqa: D102
        return self._tcp.revoke(context, ranks, failure)

    def abort(self, reason: str, origin: int | None = None) -> None:  # noqa: D102
        self._tcp.abort(reason, origin)
        self.segment.close()

    def close(self, timeout: float | None = None) -> None:  # noqa: D102
        self._tcp.close(timeout)
        self.segment.close()


def share(tcp: TcpBackend, *, required: bool, timeout: float) -> Backend:
    """Has the ranks of each host share memory, where they can; every rank of the world calls it.

    Args:
        tcp: connects all ranks.
        required: refuse to go on without.
        timeout: seconds for each step of the ranks' agreement.

    Returns:
        The backend to use: `tcp` itself if there is nothing to share.

    Raises:
        LaunchError: it is required, and a rank of this host cannot.
    """
    here = machine_id()
    members = [member for member in tcp.members if member.machine == here]
    if len(members) < 2:
        return tcp
    local_ranks = [member.rank for member in members]
    try:
        segment = meet(tcp, local_ranks, [member.pid for member in members], timeout)
    except Unshared as why:
        if required:
            tcp.abort(f"no shared memory: {why}")
            raise LaunchError(f"backend='shm' cannot be used here ({why}): use 'auto' or 'tcp'") from why
        logger.warning("rank %d: no shared memory, so all goes over TCP: %s", tcp.rank, why)
        return tcp
    return SharedMemoryBackend(tcp, local_ranks, segment)
