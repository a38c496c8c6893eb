"""Collectives by torch.distributed, messages of tensors on a GPU too, and everything else over TCP.

Strategy. A `TcpBackend` connects all ranks: it finds and proves them, carries messages, and tells who died, left or
gave up. Over it, or over the memory that ranks of one host share, they agree on each collective before an engine
begins. The collectives themselves are done by a process group of torch.distributed for each of our groups.
`torch.distributed.new_group` is not used: every rank of the world would have to call it for every group, and our groups
are made by their members alone. The process groups find their connections through a TCPStore of rank 0, which listens
where rank 0 does.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # public, by its docs

from echelon._torch_private import make_process_group
from echelon.backends.base import Backend
from echelon.backends.carried import Carried
from echelon.backends.collective import CollectiveExecutor
from echelon.backends.formats.wire import Tag
from echelon.backends.host_copies import AcceleratorStreamScope, StreamScope
from echelon.backends.operators import Combine
from echelon.backends.shared.backend import share
from echelon.backends.tcp.backend import TcpBackend
from echelon.backends.torch_distributed.agreement import agreement_of
from echelon.backends.torch_distributed.channels import Route
from echelon.backends.torch_distributed.collectives import EngineExecutor
from echelon.backends.torch_distributed.engine import Engine, EngineFailed, Look, greet
from echelon.backends.torch_distributed.engine_names import ENGINES, MESSAGES
from echelon.backends.torch_distributed.engines import is_timed
from echelon.backends.torch_distributed.messages import EngineMessages
from echelon.backends.work import Message, Received, Work
from echelon.errors import ConnectError, EchelonError, PeerFailed, Timeout
from echelon.operation_records import OperationRecord

_SEQUENCE = (1 << 64) - 2
"""Sequence number of the message with the port of the store."""
_LOOK_SECONDS = 0.02
_NEWS_SECONDS = 2.0
"""Seconds that a rank whose engine failed waits to learn which rank was the cause."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable with the network that torch's Gloo uses."""


class TorchBackend(Carried):
    """Does collectives by an engine of torch.distributed, and moves CPU tensors between two ranks over TCP.

    Tensors of a GPU go from rank to rank by the engine, if it takes any.
    """

    def __init__(self, tcp: TcpBackend, notes: Backend, name: str, store: Store) -> None:
        """Takes over a backend that is connected; `engage` makes the rest.

        Args:
            tcp: connects all ranks.
            notes: for agreements before an engine begins; carried by `tcp`, or `tcp` itself.
            name: one of `ENGINES`.
            store: that all ranks can reach, and nobody else uses.
        """
        super().__init__(tcp)
        self._notes = notes
        self._name = name
        self._store = store
        self._collectives: weakref.WeakSet[EngineExecutor] = weakref.WeakSet()
        self._streams: dict[int, torch.Stream] = {}
        self.devices = frozenset(ENGINES[name])
        self.message_devices = MESSAGES.get(name, frozenset()) | {"cpu"}
        self._messages = EngineMessages(tcp, self, MESSAGES[name]) if name in MESSAGES else None

    @property
    def name(self) -> str:  # noqa: D102
        return self._name

    def __repr__(self) -> str:
        state = ", closed" if self._tcp.is_closed else ""
        return f"<TorchBackend: rank {self.rank} of {self.world_size} over {self._name}{state}>"

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

    def executor(self, context: int, ranks: Sequence[int]) -> CollectiveExecutor | None:  # noqa: D102
        if self._name == "mpi" and len(ranks) < self.world_size:
            return None  # MPI makes groups only if all ranks of the world take part
        collectives = EngineExecutor(self, context, tuple(ranks), agreement_of(self._notes, context, ranks))
        self._collectives.add(collectives)
        return collectives

    def aside(self, context: int) -> StreamScope | None:  # noqa: D102
        if self.device.type == "cpu":
            return None
        if context not in self._streams:
            self._streams[context] = torch.Stream(self.device)
        return AcceleratorStreamScope(self._streams[context])

    def finish_queued(self) -> None:
        """Blocks until this rank's device has run all work on the caller's stream."""
        if self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()

    def check(self, context: int) -> None:
        """Raises Closed or PeerFailed if the group cannot begin an operation."""
        if self._tcp.is_closed:
            raise self.closed_error()
        if error := self._tcp.revoked(context):
            raise error

    def check_liveness(self, deadline: float, context: int, ranks: Sequence[int]) -> None:
        """Raises the reason to stop waiting, if there is one: revocation, a rank's death, or Timeout."""
        self._tcp.poll_once()
        self.check(context)
        for rank in ranks:
            error = self._tcp.failure(rank, context)
            # A rank that has closed its group has done its part of an operation that all had agreed on.
            if isinstance(error, PeerFailed) and not error.has_closed:
                raise error
        if self.now() >= deadline:
            raise Timeout(f"{self._name}: timed out")

    def explain(self, failure: EngineFailed, call: OperationRecord, context: int, ranks: Sequence[int]) -> NoReturn:
        """Raises the failure of a rank that caused an engine's failure, else an error with the engine's text."""
        raise self._cause(
            failure, partial(self.check_liveness, call.deadline, context, ranks), context, ranks
        ) from failure

    def fail_channel(self, failure: EngineFailed, look: Look, route: Route) -> EchelonError:
        """Returns the failure of a rank that caused an engine's failure, else an error with the engine's text."""
        try:
            return self._cause(failure, look, 0, [rank for rank in route[1:] if rank != self.rank])
        except EchelonError as error:
            return error

    def _cause(self, failure: EngineFailed, look: Look, context: int, ranks: Sequence[int]) -> EchelonError:
        until = self.now() + _NEWS_SECONDS
        while self.now() < until:
            look()
            time.sleep(_LOOK_SECONDS)
        left = (error for rank in ranks if (error := self._tcp.failure(rank, context)))
        return next(left, PeerFailed(self.rank, f"{self._name} failed: {failure}"))

    def open(self, context: int, ranks: Sequence[int], call: OperationRecord) -> Engine:
        """Returns a new engine for a group; all its ranks call it, when they have agreed on their first operation."""
        seconds, look = call.deadline - self.now(), partial(self.check_liveness, call.deadline, context, ranks)
        return self._open(f"{context:x}", ENGINES[self._name], ranks, seconds, look, lambda _: None)

    def open_channel(self, route: Route, look: Look) -> Engine:
        """Returns a new engine for two ranks, the sender first; both call it."""
        engines = {kind: ENGINES[self._name][kind] for kind in MESSAGES[self._name]}
        rank = route[1:].index(self.rank)
        begin = partial(greet, rank=rank, device=self.device)
        return self._open("{:x}/{}to{}".format(*route), engines, route[1:], self.timeout, look, begin)

    def _open(
        self,
        prefix: str,
        engines: Mapping[str, str],
        ranks: Sequence[int],
        seconds: float,
        look: Look,
        begin: Callable[[dist.ProcessGroup], None],
    ) -> Engine:
        """Returns a new engine, after `begin` has run on its process group; calls `look` while it waits."""
        rank, patience = list(ranks).index(self.rank), timedelta(seconds=max(1.0, seconds))
        members = self._tcp.members
        host = members[self.rank].host if members and _INTERFACE not in os.environ else ""
        # A connection of its own: a thread that waits on one blocks other threads, which make other groups.
        store = PrefixStore(prefix, self._store.clone())  # type: ignore[attr-defined] # not in its stub
        made: list[dist.ProcessGroup] = []
        problems: list[Exception] = []

        def make() -> None:
            try:
                group = make_process_group(engines, store, rank, len(ranks), patience, host)
                begin(group)
                made.append(group)
            except Exception as error:  # what torch raises here is not documented
                problems.append(error)

        # In a thread: torch waits for the other ranks in there, even for one that has died.
        thread = threading.Thread(target=make, name=f"echelon rank {self.rank}, {self._name}", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            look()
        if problems:
            raise EngineFailed(f"no connections: {problems[0]}") from problems[0]
        return Engine(made[0], rank, len(ranks), is_timed=is_timed(self._name))

    # The end

    def abort(self, reason: str, origin: int | None = None) -> None:  # noqa: D102
        self._notes.abort(reason, origin)
        self._take_apart()

    def close(self, timeout: float | None = None) -> None:  # noqa: D102
        has_left = True
        if self._messages is not None and not self._tcp.is_closed:
            has_left = self._messages.finish(self.timeout if timeout is None else timeout)
            for stream in self._streams.values():
                stream.synchronize()
        self._notes.close(timeout)
        self._take_apart()
        if not has_left:
            raise Timeout(f"close of rank {self.rank}: a message for the engine was not received in time, and is lost")

    def _take_apart(self) -> None:
        for collectives in list(self._collectives):
            collectives.close()
        if self._messages is not None:
            self._messages.close()


def engage(tcp: TcpBackend, name: str, timeout: float) -> TorchBackend:
    """Has an engine of torch.distributed do the collectives of these ranks; every rank of the world calls it.

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
    """Returns a store of rank 0 that all ranks can reach, at the address that rank 0 is reached at."""
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
