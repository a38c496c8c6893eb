"""Backend whose collectives are done by an engine of torch.distributed, and messages between GPUs too.

Strategy. A `TcpBackend` connects all ranks: it authenticates them, carries messages of CPU tensors, and detects ranks
that died, left or gave up. Over it, or over memory that the ranks of one host share, they agree on each collective
before an engine begins. Each of our groups has an engine of its own: a process group of torch.
`torch.distributed.new_group` is not used: all ranks of the world would have to call it for every group, and our groups
are made by their members alone. Engines connect through a TCPStore of their first rank, which listens where that rank
does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import Store  # type: ignore[attr-defined] # public, by its docs

from echelon.backends.base import Backend
from echelon.backends.collective import CollectiveExecutor
from echelon.backends.formats.wire import Tag
from echelon.backends.host_copies import StreamScope
from echelon.backends.shared.backend import share
from echelon.backends.tcp.backend import TcpBackend
from echelon.backends.torch_distributed.agreement import agreement_of
from echelon.backends.torch_distributed.collectives import EngineExecutor
from echelon.backends.torch_distributed.engine import Engines
from echelon.backends.torch_distributed.engines import ENGINES, MESSAGES
from echelon.backends.torch_distributed.messages import EngineMessages
from echelon.backends.torch_distributed.store import PORT_SEQUENCE, meet_at_store
from echelon.errors import Timeout


class TorchBackend(Backend):
    """Does collectives by an engine of torch.distributed, and moves CPU tensors between two ranks over TCP.

    Tensors of a GPU go from rank to rank by the engine, if it takes any.
    """

    def __init__(self, tcp: TcpBackend, notes: Backend, name: str, store: Store) -> None:
        """Takes over a connected backend.

        Args:
            tcp: connects all ranks.
            notes: for agreements before an engine begins: a backend carried by `tcp`, or `tcp` itself.
            name: one of `ENGINES`.
            store: of rank 0, used for nothing else.
        """
        self._engines = Engines(tcp, name, store)
        types = MESSAGES.get(name, frozenset())
        self._engine_messages = EngineMessages(tcp, self._engines, types) if types else None
        super().__init__(self._engine_messages or tcp.messages, tcp.control, tcp.lanes)
        self._control = tcp.control
        self._notes = notes
        self.devices = frozenset(ENGINES[name])

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
        state = ", closed" if self._control.is_closed else ""
        return f"<TorchBackend: rank {self.rank} of {self.world_size} over {self.name}{state}>"

    # Collectives

    def executor(self, context: int, ranks: Sequence[int]) -> CollectiveExecutor | None:  # noqa: D102
        if self.name == "mpi" and len(ranks) < self.world_size:
            return None  # MPI makes groups only if all ranks of the world take part
        return EngineExecutor(self._engines, context, tuple(ranks), agreement_of(self._notes, context, ranks))

    def aside(self, context: int) -> StreamScope | None:  # noqa: D102
        return self._engines.scope(context)

    # The end

    def abort(self, reason: str, origin: int | None = None) -> None:  # noqa: D102
        self._notes.abort(reason, origin)
        self._engines.close()

    def close(self, timeout: float | None = None) -> None:  # noqa: D102
        has_left = True
        if self._engine_messages is not None and not self._control.is_closed:
            has_left = self._engine_messages.finish(self.timeout if timeout is None else timeout)
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
    store = meet_at_store(tcp, range(tcp.world_size), Tag(0, PORT_SEQUENCE), timeout)
    return TorchBackend(tcp, notes, name, store)
