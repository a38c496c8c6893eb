"""Connection of ranks through a store of torch.distributed.

Ranks exchange addresses and a secret over the store, which authenticates nobody and encrypts nothing. If
`ECHELON_SECRET` is set on all ranks, it is used instead.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # public, by its docs

from echelon.backends.tcp.backend import TcpBackend
from echelon.errors import ConnectError
from echelon.launch import environment
from echelon.launch.environment import Environment
from echelon.launch.interface import with_local_address

_HERE = ("127.0.0.1", "::1", "localhost")
_END_SECONDS = 0.2
"""Most seconds for rank 0 to end the server of a store after its group. It took 1 to 10 ms on a busy machine."""


def connect_ranks(store: Store, rank: int, world_size: int, timeout: float, connect_timeout: float) -> TcpBackend:
    """Connects all ranks that share this store. Blocks until they are connected.

    Args:
        store: torch's store, used by these ranks only.
        rank, world_size: among these ranks.
        timeout: default timeout of the backend's calls, seconds.
        connect_timeout: seconds that the ranks have to find each other.

    Raises:
        ConnectError, AuthenticationError: the ranks did not all find each other.
        LaunchError: ECHELON_SECRET or ECHELON_INTERFACE has an invalid value.
    """
    if world_size == 1:
        return TcpBackend(0, 1, "", timeout=timeout, secret=b"")  # connects to nobody, so it needs no secret
    place = with_local_address(_environment(store, rank, world_size), os.environ)
    # A program may connect more than once, so each call needs keys of its own. Ranks count alike without agreement.
    call = store.add(f"echelon/calls of rank {rank}", 1)
    keys = PrefixStore(f"echelon/call {call}", store)
    return _connect(place, keys, timeout, connect_timeout)


def connect_default_group(timeout: float, connect_timeout: float) -> TcpBackend:
    """Connects the ranks of torch's default group. Blocks; see `connect_ranks`."""
    world = dist.group.WORLD
    assert world is not None
    store = world.get_group_store()
    return connect_ranks(store, dist.get_rank(), dist.get_world_size(), timeout, connect_timeout)


def connect_elastic(launched: Environment, timeout: float, connect_timeout: float) -> TcpBackend:
    """Connects the ranks that torchrun started, through its store. Blocks until they are connected.

    Raises:
        ConnectError, AuthenticationError: the ranks did not all find each other.
    """
    backend = _connect(launched, _elastic_store(launched, connect_timeout), timeout, connect_timeout)
    # Without the agent's store, rank 0 serves the store, which ends with this function: all must have read it before.
    if not launched.agent_store:
        backend.messages.barrier(connect_timeout)
    return backend


def _connect(launched: Environment, store: Store, timeout: float, connect_timeout: float) -> TcpBackend:
    return TcpBackend.from_store(
        launched.rank,
        launched.world_size,
        store,
        launched.master_addr,
        timeout=timeout,
        secret=launched.secret or _shared_secret(launched.rank, store),
        run_id=launched.run_id,
        restart=launched.restart,
        local_address=launched.local_address,
        connect_timeout=connect_timeout,
    )


def _shared_secret(rank: int, store: Store) -> bytes:
    """Returns a secret that rank 0 makes and shares through a store. Blocks on the other ranks until it is there.

    Raises:
        ConnectError: rank 0 has not stored it within the store's timeout.
    """
    if rank == 0:
        store.set("secret", secrets.token_hex(32))
    try:
        return bytes(store.get("secret"))
    except RuntimeError as error:
        raise ConnectError(
            f"rank {rank} found no secret of rank 0 in torch's store in time: check that rank 0 runs"
        ) from error


@contextmanager
def outlasting_server(store: Store) -> Iterator[None]:
    """Blocks at its end until the server of a TCPStore is gone, at most 0.2 s. For ranks that do not serve it.

    Otherwise a rank that opens the default group again may find the old server, which ends under it: rank 0 ends the
    server after its group. Does nothing for other stores, and for torchrun's, which serves until the job ends.
    """
    store, agents = _underlying(store), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # A simulated store says that it is a TCPStore.
    if type(store) is not TCPStore or agents:
        yield
        return
    try:
        connection = socket.create_connection((store.host, store.port), _END_SECONDS)
    except OSError:  # it is gone already
        yield
        return
    with connection:
        yield
        # The server sends nothing to a silent client. To connect again and again instead disturbs the next server.
        with suppress(OSError):
            connection.recv(1)


def _underlying(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _environment(store: Store, rank: int, world_size: int) -> Environment:
    """Returns the environment of a rank, with the store's address as rendezvous. MASTER_ADDR if the store has none."""
    # Other kinds of store, such as a FileStore, have no address.
    store = _underlying(store)
    host, port = os.environ.get("MASTER_ADDR") or _HERE[0], 0
    if isinstance(store, TCPStore):
        host, port = store.host, store.port
    return Environment(
        rank,
        world_size,
        local_rank=0,  # a store does not say which ranks share a host; the ranks find out when they connect
        local_world_size=1,
        master_addr=host,
        master_port=port,
        secret=environment.read_secret(os.environ),
        is_one_host=host in _HERE or os.environ.get("LOCAL_WORLD_SIZE") == str(world_size),
    )


def _elastic_store(launched: Environment, connect_timeout: float) -> Store:
    """Opens torchrun's store: the agent's, or, with a static rendezvous, one that rank 0 serves on the master port."""
    try:
        server = TCPStore(
            launched.master_addr,
            launched.master_port,
            world_size=launched.world_size,
            is_master=launched.rank == 0 and not launched.agent_store,
            timeout=timedelta(seconds=connect_timeout),
            wait_for_workers=False,  # the rendezvous waits, and names the ranks that are missing
            multi_tenant=True,  # a second `init` of this process uses the server of the first
        )
        # A program may call init again, and torchrun may restart it: each call and restart needs keys of its own.
        store = PrefixStore(f"echelon/{launched.restart}", server)
        call = store.add(f"calls of rank {launched.rank}", 1)
    except RuntimeError as error:
        raise ConnectError(
            f"rank {launched.rank} cannot reach torchrun's store at {launched.address} within {connect_timeout:g} s: "
            "check MASTER_ADDR and MASTER_PORT, and that rank 0 runs"
        ) from error
    return PrefixStore(f"call {call}", store)
