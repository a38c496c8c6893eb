"""Backend whose collectives are done by an engine of torch.distributed, and messages between GPUs too.

Strategy. A `TcpBackend` connects all ranks: it authenticates them, carries messages of CPU tensors, and detects ranks
that died, left or gave up. Over it, or over memory that the ranks of one host share, they agree on each collective
before an engine begins. Each of our groups has an engine of its own: a process group of torch.
`torch.distributed.new_group` is not used: all ranks of the world would have to call it for every group, and our groups
are made by their members alone. Engines connect through a TCPStore of rank 0, which listens where rank 0 does.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined] # public, by its docs

from echelon.backends.base import Backend
from echelon.backends.carried import Carried
from echelon.backends.formats.wire import Tag
from echelon.backends.host_copies import StreamScope
from echelon.backends.native import NativeCollectives
from echelon.backends.operators import Combine
from echelon.backends.shared.backend import share
from echelon.backends.tcp.backend import TcpBackend
from echelon.backends.torch_distributed.agreement import agreement_of
from echelon.backends.torch_distributed.collectives import TorchCollectives
from echelon.backends.torch_distributed.engine import Engines
from echelon.backends.torch_distributed.engines import ENGINES, MESSAGES
from echelon.backends.torch_distributed.messages import EngineMessages
from echelon.backends.work import Message, Received, Work
from echelon.errors import ConnectError, Timeout

# Sequence number of the message with the port of the store; collectives never get as far.
_SEQUENCE = (1 << 64) - 2


class TorchBackend(Carried):
    """Does collectives by an engine of torch.distributed, and moves CPU tensors between two ranks over TCP.

    Tensors of a GPU go from rank to rank by the engine, if it takes any.
    """

    def __init__(self, tcp: TcpBackend, notes: Backend, name: str, store: Store) -> None:
        """Takes over a connected backend.

        Args:
            tcp: connects all ranks.
            notes: for agreements before an engine begins: a backend carried by `tcp`, or `tcp` itself.
            name: one of `ENGINES`.
            store: reached by all ranks, used for nothing else.
        """
        self._engines = Engines(tcp, name, store)
        super().__init__(tcp)
        self._notes = notes
        self.devices = frozenset(ENGINES[name])
        types = MESSAGES.get(name, frozenset())
        self.message_devices = types | {"cpu"}
        self._messages = EngineMessages(tcp, self._engines, types) if types else None

    @property
    def name(self) -> str:  # noqa: D102
        return self._engines.name

    @property
    def device(self) -> torch.device:
        """Device of this rank's tensors."""
        return self._engines.device

    @device.setter
    def device(self, device: torch.device) -> None:
        self._engines.device = device

    def __repr__(self) -> str:
        state = ", closed" if self._tcp.is_closed else ""
        return f"<TorchBackend: rank {self.rank} of {self.world_size} over {self.name}{state}>"

    # Messages

    def isend(self, tensor: torch.Tensor, dst: int, tag: int | Tag = 0, *, note: str = "") -> Work[None]:  # noqa: D102
        if self._messages is None:
            return super().isend(tensor, dst, tag, note=note)
        return self._messages.isend(tensor, dst, self.checked_send(tensor, dst, tag), note)

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
        if self._messages is None:
            return super().irecv(src, tag, out=out, note=note, must_fit=must_fit, combine=combine)
        return self._messages.irecv(src, self.checked_receive(src, tag, out), out, note, must_fit, combine)

    def irecv_any(  # noqa: D102
        self, sources: Mapping[int, int], tag: int | Tag = 0, *, note: str | None = ""
    ) -> Work[Received]:
        if self._messages is None:
            return super().irecv_any(sources, tag, note=note)
        return self._messages.irecv_any(sources, self.checked_receive_any(sources, tag), note)

    # Fast paths are TCP's. Messages of an engine have none: they wait for an answer at least.

    def send_at_once(self, tensor: torch.Tensor, dst: int, tag: Tag, *, note: str = "") -> bool:  # noqa: D102
        return self._messages is None and super().send_at_once(tensor, dst, tag, note=note)

    def recv_at_once(  # noqa: D102
        self, src: int, tag: Tag, *, out: torch.Tensor | None = None, note: str | None = ""
    ) -> Message | None:
        return super().recv_at_once(src, tag, out=out, note=note) if self._messages is None else None

    def cancel(self, work: Work[torch.Tensor] | Work[Received]) -> None:  # noqa: D102
        if self._messages is None:
            super().cancel(work)
        else:
            self._messages.cancel(work)

    # Collectives

    def native_collectives(self, context: int, ranks: Sequence[int]) -> NativeCollectives | None:  # noqa: D102
        if self.name == "mpi" and len(ranks) < self.world_size:
            return None  # MPI makes groups only if all ranks of the world take part
        return TorchCollectives(self._engines, context, tuple(ranks), agreement_of(self._notes, context, ranks))

    def aside(self, context: int) -> StreamScope | None:  # noqa: D102
        return self._engines.scope(context)

    # The end

    def abort(self, reason: str, origin: int | None = None) -> None:  # noqa: D102
        self._notes.abort(reason, origin)
        self._engines.close()

    def close(self, timeout: float | None = None) -> None:  # noqa: D102
        has_left = True
        if self._messages is not None and not self._tcp.is_closed:
            has_left = self._messages.finish(self.timeout if timeout is None else timeout)
            self._engines.finish_scopes()
        self._notes.close(timeout)
        self._engines.close()
        if not has_left:
            raise Timeout(f"close of rank {self.rank}: a message for the engine was not received in time, and is lost")


def engage(tcp: TcpBackend, name: str, timeout: float) -> TorchBackend:
    """Makes a backend with an engine of torch.distributed over TCP connections. Every rank of the world calls it.

    Args:
        tcp: connects all ranks.
        name: one of `ENGINES`.
        timeout: seconds to find the store of rank 0.

    Raises:
        ConnectError: the store of rank 0 cannot be reached.
    """
    notes = share(tcp, required=False, timeout=timeout)
    return TorchBackend(tcp, notes, name, meet_at_store(tcp, timeout))


def meet_at_store(tcp: TcpBackend, timeout: float) -> Store:
    """Returns a store of rank 0, at the address by which the other ranks reach rank 0. Every rank calls it."""
    if tcp.world_size == 1:
        return HashStore()
    host, patience = tcp.members[0].host, timedelta(seconds=timeout)
    tag = Tag(0, _SEQUENCE)
    if tcp.rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=tcp.world_size) as listener:
            port = listener.getsockname()[1]
            # torch takes over the socket, and closes it.
            store = TCPStore(
                host, port, None, True, patience, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
            )
        for rank in range(1, tcp.world_size):
            tcp.send(torch.tensor([port], device="cpu"), rank, tag, timeout)
        return store
    port = int(tcp.recv(0, tag, timeout=timeout).item())
    try:
        return TCPStore(host, port, None, False, patience, wait_for_workers=False)
    except RuntimeError as error:
        raise ConnectError(
            f"rank {tcp.rank} cannot reach the store of rank 0 at {host}, port {port}: check that a firewall lets it"
        ) from error
