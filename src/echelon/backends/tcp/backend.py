"""Ranks connected by TCP, one socket for every pair.

Strategy. `rendezvous` connects the pairs. `Reader` reads the links of all peers, `Mailbox` pairs messages with
receives. `Progress` decides which thread polls; its one lock guards all state. A wait ends because its Work completes,
its peer fails, or its time is up. Closing waits until sent messages have left, and then for the other threads.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence

from echelon.backends.base import Backend, check_rank
from echelon.backends.connect.members import Job, machine_id
from echelon.backends.connect.rendezvous import ConnectedRanks, Store, meet, meet_through_store
from echelon.backends.formats import wire
from echelon.backends.lanes import ThreadLanes
from echelon.backends.matching import Mailbox
from echelon.backends.tcp.control import TcpControl
from echelon.backends.tcp.control_frames import ControlFrames
from echelon.backends.tcp.inbox import MAX_UNCLAIMED_BYTES
from echelon.backends.tcp.link import Link, Memory
from echelon.backends.tcp.messages import TcpMessages
from echelon.backends.tcp.parting import Parting
from echelon.backends.tcp.peers import Peers
from echelon.backends.tcp.poller import Poller
from echelon.backends.tcp.process_watch import ProcessWatch
from echelon.backends.tcp.progress import Progress
from echelon.backends.work import DEFAULT_TIMEOUT
from echelon.cores import num_cores
from echelon.errors import AuthenticationError
from echelon.operation_records import FlightRecorder

CONNECT_TIMEOUT = 60.0
"""Default number of seconds that the ranks have to find each other."""


class TcpBackend(Backend):
    """Moves CPU tensors over one TCP connection per pair of ranks."""

    messages: TcpMessages
    control: TcpControl
    lanes: ThreadLanes

    def __init__(
        self,
        rank: int,
        world_size: int,
        master_addr: str = "127.0.0.1:29500",
        *,
        timeout: float = DEFAULT_TIMEOUT,
        connect_timeout: float = CONNECT_TIMEOUT,
        secret: bytes | None = None,
        run_id: str = "",
        restart: int = 0,
        local_address: str | None = None,
        max_message_bytes: int = wire.MAX_MESSAGE_BYTES,
        max_unclaimed_bytes: int = MAX_UNCLAIMED_BYTES,
    ) -> None:
        """Connects to all other ranks; returns when every pair is connected.

        Args:
            rank: this process, 0 to world_size - 1.
            world_size: the number of ranks; a world of one opens no socket.
            master_addr: "host:port" at which rank 0 listens, on exactly that address.
            timeout: seconds that a blocking call waits by default.
            connect_timeout: seconds that the ranks have to find each other.
            secret: shared by all ranks; None: the variable ECHELON_SECRET.
            run_id: ranks of another run are refused.
            restart: ranks of another attempt at the same run are refused.
            local_address: of this host, to listen on and to dial from; None: rank 0 listens at `master_addr`, the
                others on their address on the way there.
            max_message_bytes: a larger message from a peer is a ProtocolError.
            max_unclaimed_bytes: reading from a peer pauses when its unclaimed messages take more memory.

        Raises:
            InvalidRank, InvalidWorldSize: the numbers are wrong.
            ConnectError: ranks are missing when the time is up (they are named), or this one was turned away.
            AuthenticationError: no secret, or not the others'.
        """
        check_rank(rank, world_size)
        connected = ConnectedRanks((), {})
        if world_size > 1:
            job = Job(rank, world_size, _secret(secret), run_id, restart)
            connected = meet(job, master_addr, connect_timeout, local_address)
        self._open(rank, world_size, timeout, connected, max_message_bytes, max_unclaimed_bytes)

    @classmethod
    def from_store(
        cls,
        rank: int,
        world_size: int,
        store: Store,
        store_host: str,
        *,
        secret: bytes,
        timeout: float = DEFAULT_TIMEOUT,
        connect_timeout: float = CONNECT_TIMEOUT,
        run_id: str = "",
        restart: int = 0,
        local_address: str | None = None,
        max_message_bytes: int = wire.MAX_MESSAGE_BYTES,
        max_unclaimed_bytes: int = MAX_UNCLAIMED_BYTES,
    ) -> TcpBackend:
        """Connects all ranks through a store that exists already, such as that of torchrun's agent.

        Args:
            rank: this process.
            world_size: the number of ranks.
            store: a torch.distributed.Store, or anything with its set, get and check.
            store_host: where the store is; this rank listens on its own address on the way there.
            secret: shared by all ranks.
            timeout, connect_timeout, run_id, restart, local_address, max_message_bytes, max_unclaimed_bytes: as in the
                constructor.
        """
        backend = cls.__new__(cls)
        check_rank(rank, world_size)
        job = Job(rank, world_size, secret, run_id, restart)
        connected = meet_through_store(job, store, store_host, connect_timeout, local_address)
        backend._open(rank, world_size, timeout, connected, max_message_bytes, max_unclaimed_bytes)
        return backend

    def _open(
        self,
        rank: int,
        world_size: int,
        timeout: float,
        connected: ConnectedRanks,
        max_message_bytes: int,
        max_unclaimed_bytes: int,
    ) -> None:
        machines = list(dict.fromkeys(member.machine for member in connected.members))
        hosts = tuple(machines.index(member.machine) for member in connected.members) or (0,)
        self.members = connected.members
        """Host, port and process of every rank, by rank. Empty if the world size is 1."""
        self.max_message_bytes = max_message_bytes
        """A larger message from a peer is a ProtocolError."""
        self._has_cores = hosts.count(hosts[rank]) <= num_cores()
        lanes = ThreadLanes(f"echelon rank {rank}", timeout)
        recorder, mailbox, poller = FlightRecorder(), Mailbox(), Poller()
        # Lambdas, since `peers` and `control` are made from it.
        self._progress = progress = Progress(
            rank, poller, lambda: peers.is_busy(), self._may_spin, lambda: control.closed_error()
        )
        parting = Parting(rank, recorder, mailbox)
        self._peers = peers = Peers(poller, progress, mailbox, max_unclaimed_bytes)
        self._processes = processes = ProcessWatch(peers)
        frames = ControlFrames(peers, recorder, parting)
        control = TcpControl(rank, world_size, recorder, hosts, peers, frames, processes, parting)
        messages = TcpMessages(rank, world_size, timeout, peers, parting, control.closed_error)
        super().__init__(messages, control, lanes)
        with progress.lock:
            for peer, sock in sorted(connected.sockets.items()):
                peers.connect(peer, sock, max_message_bytes, frames.on_frame)
            here = machine_id() if connected.members else ""
            for member in connected.members:
                if member.rank != rank and member.machine == here:
                    processes.watch(member)
            if connected.sockets:
                progress.start_background()
        _open_backends.add(self)

    @property
    def name(self) -> str:  # noqa: D102
        return "tcp"

    def __repr__(self) -> str:
        state = ", closed" if self.control.is_closed else ""
        return f"<TcpBackend: rank {self.rank} of {self.world_size}{state}>"

    def _may_spin(self) -> bool:
        """Whether the calling thread may spin while it waits: every rank of the host has a core, no lane needs it."""
        # With 4 ranks on 2 cores, spinning made small messages 2 to 5 times slower (benchmarks/tcp).
        return self._has_cores and not self.lanes.runs_beside()

    def crosses_network(self, ranks: Sequence[int]) -> bool:  # noqa: D102
        return not self._peers.on_loopback.issuperset(set(ranks) - {self.rank})

    def use_links(self, links: Mapping[int, Link], memory: Memory, doorbell: int) -> None:
        """Routes messages to and from these ranks over links in `memory` from now on; see `Poller.watch_memory`."""
        with self._progress.lock:
            self._peers.use_links(links, memory, doorbell)
            self._progress.wake()

    def _become_child(self) -> None:
        """Closes the copies of a forked child, without blocking or locks."""
        if not self._progress.is_closed:
            self._progress.become_child()
            self._peers.close_in_child()
            self._processes.close()


def _secret(secret: bytes | None) -> bytes:
    """Returns the secret given, or the one in the environment."""
    found = secret if secret is not None else os.environ.get("ECHELON_SECRET", "").encode()
    if not found:
        raise AuthenticationError(
            "no secret: start the ranks with `echelon run`, set ECHELON_SECRET to the same random text for every rank, "
            "or pass secret="
        )
    return found


_open_backends: weakref.WeakSet[TcpBackend] = weakref.WeakSet()


def _leave_all_to_the_parent() -> None:
    for backend in list(_open_backends):
        backend._become_child()
    _open_backends.clear()  # a grandchild would close the same numbers again, by then those of other files


os.register_at_fork(after_in_child=_leave_all_to_the_parent)
