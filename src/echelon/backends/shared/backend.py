"""Backend over shared memory for ranks of one host, and over TCP for ranks of other hosts.

Strategy. A `TcpBackend` connects all ranks: it finds and authenticates them, carries messages between hosts, and
reports deaths, exits and revocations. The ranks of one host share a segment as well, through which they send messages
and groups of them run their collectives. A rank that waits there polls the connections every 20 to 50 ms, so a failure
reported over them ends its wait.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence

import torch

from echelon.backends.base import Backend
from echelon.backends.collective import CollectiveExecutor, wait_and_look
from echelon.backends.connect.members import machine_id
from echelon.backends.formats import memory_layout
from echelon.backends.formats.wire import Tag
from echelon.backends.shared.collectives.executor import SharedMemoryExecutor
from echelon.backends.shared.collectives.sync_block import SyncBlock
from echelon.backends.shared.memory.segment import Window
from echelon.backends.shared.memory.setup import Common, Unshared, meet
from echelon.backends.shared.memory.waiting import SpinThenSleep
from echelon.backends.shared.messages.message_region import MessageRegion
from echelon.backends.shared.messages.receiver import RingReceiver
from echelon.backends.shared.messages.sender import RingSender
from echelon.backends.tcp.backend import TcpBackend
from echelon.backends.tcp.link import Link
from echelon.errors import LaunchError, Timeout
from echelon.operation_records import OperationRecord
from echelon.wording import listed

logger = logging.getLogger("echelon")

# Sequence number of the message with the offset of a group's region: no collective ever gets it.
_REGION_SEQUENCE = (1 << 64) - 1


class SharedMemoryBackend(Backend):
    """Backend that moves CPU tensors through shared memory within a host, and over TCP between hosts."""

    def __init__(self, tcp: TcpBackend, local_ranks: Sequence[int], common: Common) -> None:
        """Takes over a connected backend and the resources that these ranks share. `share` makes both."""
        super().__init__(tcp.messages, tcp.control, tcp.lanes)
        self._control = tcp.control
        self._local_ranks = frozenset(local_ranks)
        self.segment = common.segment
        """Memory file that the ranks of this host share."""
        self.waiter = SpinThenSleep(len(local_ranks))
        """Adaptive wait of this rank, one for all of its groups."""
        # Weak: an executor keeps its group's memory mapped.
        self._executors: weakref.WeakSet[SharedMemoryExecutor] = weakref.WeakSet()
        region = MessageRegion(common.segment, list(local_ranks).index(tcp.rank), common.doorbells)
        self._doorbells = region.doorbells
        links = {
            rank: Link(rank, RingSender(region, number), RingReceiver(region, number, tcp.max_message_bytes))
            for number, rank in enumerate(local_ranks)
            if rank != tcp.rank
        }
        tcp.use_links(links, region, region.doorbells.own)

    @property
    def name(self) -> str:  # noqa: D102
        return "shm"

    def __repr__(self) -> str:
        state = ", closed" if self._control.is_closed else ""
        return f"<SharedMemoryBackend: rank {self.rank} of {self.world_size}, {len(self._local_ranks)} here{state}>"

    # Collectives

    def executor(self, context: int, ranks: Sequence[int]) -> CollectiveExecutor | None:  # noqa: D102
        # A group that spans hosts runs plans over messages instead.
        if len(ranks) < 2 or not self._local_ranks.issuperset(ranks):
            return None
        own = list(ranks).index(self.rank)
        executor = SharedMemoryExecutor(self, self._control.check_open, context, tuple(ranks), own)
        self._executors.add(executor)
        return executor

    def crosses_network(self, ranks: Sequence[int]) -> bool:  # noqa: D102
        return not self._local_ranks.issuperset(ranks)

    def check_liveness(self, call: OperationRecord, context: int, rank: int | None, board: SyncBlock | None) -> None:
        """Raises if waiting is in vain: a disagreement, a failure of `rank` or of the group, or the deadline."""
        # Reads the connections first: nobody else may be polling while this rank waits in shared memory.
        self._control.poll()
        # A disagreement comes before failures and the deadline: it is their first cause, with both sides' calls.
        if board is not None and (disagreement := board.disagreement()):
            raise disagreement
        if error := self._control.failure(self.rank if rank is None else rank, context):
            raise error
        if self.now() >= call.deadline:
            missing = board.missing() if board is not None else []
            raise Timeout(f"timed out waiting for {listed(missing) if missing else 'another rank'}")

    def map_region(self, call: OperationRecord, context: int, ranks: tuple[int, ...]) -> Window:
        """Maps the region of a group. The first rank allocates it; the others block for its offset."""
        size = len(ranks) * memory_layout.ROOM_BYTES
        tag = Tag(context, _REGION_SEQUENCE)
        first, *others = ranks
        if self.rank == first:
            offset = self.segment.allocate(size)
            for rank in others:
                self.messages.send(torch.tensor([offset], device="cpu"), rank, tag, call.deadline - time.monotonic())
        else:
            work = self.messages.irecv(first, tag)
            try:
                offset = int(wait_and_look(work, first, call, self.now).item())
            except BaseException:
                self.messages.cancel(work)
                raise
        return self.segment.map(offset, size)

    # The end

    def abort(self, reason: str, origin: int | None = None) -> None:  # noqa: D102
        super().abort(reason, origin)
        self._free()

    def close(self, timeout: float | None = None) -> None:  # noqa: D102
        try:
            super().close(timeout)
        finally:
            self._free()

    def _free(self) -> None:
        # A forked child: a thread of its parent may have held the lock of the doorbells at the fork.
        if self.control.is_inherited:
            return
        for executor in list(self._executors):
            executor.stop()
        self._doorbells.close()
        self.segment.close()


def share(tcp: TcpBackend, *, required: bool, timeout: float) -> Backend:
    """Sets up shared memory on each host where that is possible. Every rank of the world calls it.

    Args:
        tcp: connects all ranks.
        required: whether to raise if the ranks of this host cannot share memory.
        timeout: in seconds, for each step of the agreement.

    Returns:
        The backend to use: `tcp` itself if there is nothing to share.

    Raises:
        LaunchError: it is required, and a rank of this host cannot.
    """
    # Only ranks that see each other's processes: containers of one machine may not.
    here = machine_id()
    members = [member for member in tcp.members if member.machine == here]
    if len(members) < 2:
        return tcp
    local_ranks = [member.rank for member in members]
    try:
        common = meet(tcp, local_ranks, [member.pid for member in members], timeout)
    except Unshared as why:
        if required:
            # All local ranks raise alike; the others learn the reason through the abort.
            tcp.abort(f"no shared memory: {why}")
            raise LaunchError(f"backend='shm' cannot be used here ({why}): use 'auto' or 'tcp'") from why
        if tcp.rank == local_ranks[0]:  # all ranks of the host know the same reason: one line is enough
            logger.warning("no shared memory, so all goes over TCP: %s", why)
        return tcp
    return SharedMemoryBackend(tcp, local_ranks, common)
