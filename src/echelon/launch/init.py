"""Makes the group of all ranks from whatever started this program.

Strategy. `init` looks in four places, in this order: a group provided by the code that called us (simulated ranks,
spawn), a launcher that gave a secret, torchrun's store, nothing at all (a world of one).
"""

from __future__ import annotations

import atexit
import os
import secrets
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # public, by its docs

from echelon.backends.base import DEFAULT_TIMEOUT, Backend
from echelon.backends.shared.backend import share
from echelon.backends.tcp import TcpBackend
from echelon.errors import ConnectError, LaunchError
from echelon.flights import FlightRecord, FlightRecorder
from echelon.group import ProcessGroup
from echelon.launch import environment
from echelon.launch.environment import Environment
from echelon.launch.report import report_uncaught
from echelon.launch.tuned import agreed_table

CONNECT_TIMEOUT = 60.0
"""Seconds in which all ranks have to find each other."""

_latest: deque[FlightRecorder] = deque(maxlen=1)
"""What the group that `init` made last has recorded: kept after the group is gone, for whoever asks why."""
_provided: ContextVar[ProcessGroup | None] = ContextVar("echelon_provided_group", default=None)


@contextmanager
def provide(group: ProcessGroup) -> Iterator[None]:
    """Makes `init` return `group` inside the with block, in this thread.

    Whatever runs ranks by itself (`simulate`, `spawn`) uses this, so that a script which calls `echelon.init()`
    runs there unchanged.
    """
    token = _provided.set(group)
    try:
        yield
    finally:
        _provided.reset(token)


def init(backend: str = "auto", timeout: float = DEFAULT_TIMEOUT) -> ProcessGroup:
    """Returns the group of all ranks of this job.

    Who started the program decides: `echelon run`, `echelon.spawn`, torchrun and other launchers that set RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or `echelon.simulate`. Started alone, it is a world of one. At the end
    of the program the group is closed; if the program ends with an exception, the other ranks are told.

    The ranks prove to each other that they know the job's secret, ECHELON_SECRET. `echelon run` makes one. Under
    torchrun, rank 0 makes one and shares it through torch's store, which asks nobody who they are: that keeps out
    strangers who only find the port of a rank, and nobody who can reach the store. Set ECHELON_SECRET yourself
    where that matters.

    Args:
        backend: "shm" (shared memory between ranks of one host, TCP between hosts), "tcp", or "auto": shared memory
            where the system has it. The environment variable ECHELON_BACKEND overrules "auto".
        timeout: seconds that a blocking call of the group waits unless told otherwise.

    Raises:
        LaunchError: the environment or the arguments make no sense. Three of its kind have types of their own:
            InvalidRank, InvalidWorldSize, and PlanError for a tuned table of collectives.
        ConnectError: the ranks did not all find each other within 60 s (or `timeout`, if that is shorter).
        AuthenticationError: a rank has another secret.
    """
    if timeout <= 0:
        raise LaunchError(f"timeout={timeout}: use a number of seconds above 0")
    provided = _provided.get()
    if provided is not None:
        return _accept(provided, backend)
    name = environment.read_backend(os.environ, backend)
    if name == "simulated":
        raise LaunchError(
            "backend='simulated' exists only inside echelon.simulate(fn, world_size): call that, or use 'auto'"
        )
    launched = environment.read(os.environ)
    connected = share_memory(_connect(launched, timeout), name, min(timeout, CONNECT_TIMEOUT))
    group = ProcessGroup(connected, table=agreed_table(connected, min(timeout, CONNECT_TIMEOUT)))
    _latest.append(connected.flight_recorder)
    if launched is not None:
        report_uncaught(group)
        atexit.register(_close, weakref.ref(group))
    return group


def flight_recorder(group: ProcessGroup | None = None) -> tuple[FlightRecord, ...]:
    """Returns the last 1,000 operations of this rank, the oldest first: what was called, where, and how it ended.

    Collectives, and messages between two ranks. Nothing of the tensors is kept but their shapes and bytes.

    Args:
        group: any group of this rank; None: the one that `init` gave.
    """
    found = group or _provided.get()
    recorder = found.backend.flight_recorder if found is not None else next(iter(_latest), None)
    return recorder.records() if recorder is not None else ()


def _accept(provided: ProcessGroup, backend: str) -> ProcessGroup:
    if backend not in ("auto", provided.backend.name):
        raise LaunchError(
            f"backend={backend!r}: this rank was started with {provided.backend.name!r}: use 'auto' to accept any"
        )
    return provided


def share_memory(tcp: TcpBackend, name: str, timeout: float) -> Backend:
    """Returns the backend of that name over connections that are there; all ranks call it.

    Args:
        tcp: connects all ranks.
        name: "auto", "shm" or "tcp".
        timeout: seconds for the ranks to agree.

    Raises:
        LaunchError: "shm" was asked for, and a rank of this host cannot share memory.
    """
    return tcp if name == "tcp" else share(tcp, required=name == "shm", timeout=timeout)


def _connect(launched: Environment | None, timeout: float) -> TcpBackend:
    if launched is None:
        return TcpBackend(0, 1, "", timeout=timeout, secret=b"")
    connect_timeout = min(timeout, CONNECT_TIMEOUT)
    if launched.elastic:
        return _connect_through_store(launched, timeout, connect_timeout)
    if launched.secret is None:
        raise LaunchError(
            "ECHELON_SECRET is not set: start the ranks with `echelon run` or torchrun, or set it to the same "
            "random text on every rank, such as the output of `openssl rand -hex 32`"
        )
    return TcpBackend(
        launched.rank,
        launched.world_size,
        launched.address,
        timeout=timeout,
        secret=launched.secret,
        run_id=launched.run_id,
        restart=launched.restart,
        connect_timeout=connect_timeout,
    )


def _connect_through_store(launched: Environment, timeout: float, connect_timeout: float) -> TcpBackend:
    store = _elastic_store(launched, connect_timeout)
    backend = TcpBackend.from_store(
        launched.rank,
        launched.world_size,
        store,
        launched.master_addr,
        timeout=timeout,
        secret=launched.secret or _shared_secret(launched.rank, store),
        run_id=launched.run_id,
        restart=launched.restart,
        connect_timeout=connect_timeout,
    )
    if not launched.agent_store:
        backend.barrier(connect_timeout)  # the store ends with this function on rank 0: not before all have read it
    return backend


def _elastic_store(launched: Environment, connect_timeout: float) -> Store:
    """Opens torchrun's store: its agent's, or (with a static rendezvous) one that rank 0 serves on the master port."""
    try:
        server = TCPStore(
            launched.master_addr,
            launched.master_port,
            world_size=launched.world_size,
            is_master=launched.rank == 0 and not launched.agent_store,
            timeout=timedelta(seconds=connect_timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
        # A program may call init again: every call gets keys of its own, and so does every restart.
        store = PrefixStore(f"echelon/{launched.restart}", server)
        call = store.add(f"calls of rank {launched.rank}", 1)
    except RuntimeError as error:
        raise ConnectError(
            f"rank {launched.rank} cannot reach torchrun's store at {launched.address} within {connect_timeout:g} s: "
            "check MASTER_ADDR and MASTER_PORT, and that rank 0 runs"
        ) from error
    return PrefixStore(f"call {call}", store)


def _shared_secret(rank: int, store: Store) -> bytes:
    if rank == 0:
        store.set("secret", secrets.token_hex(32))
    try:
        return bytes(store.get("secret"))
    except RuntimeError as error:
        raise ConnectError(f"rank {rank} waited in vain for rank 0 in torchrun's store: check rank 0") from error


def _close(reference: weakref.ref[ProcessGroup]) -> None:
    group = reference()
    if group is not None:
        group.close()
