"""Connects ranks that torch.distributed has brought together, through its store.

They exchange addresses and a secret over it, which asks nobody who they are and hides nothing; `ECHELON_SECRET`, where
it is set on all ranks, is used instead.
"""

from __future__ import annotations

import os
import secrets

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # public, by its docs

from echelon.backends.tcp.backend import TcpBackend
from echelon.errors import ConnectError
from echelon.launch import environment
from echelon.launch.environment import Environment
from echelon.launch.interface import with_local_address

_HERE = ("127.0.0.1", "::1", "localhost")


def connect_ranks(store: Store, rank: int, world_size: int, timeout: float, connect_timeout: float) -> TcpBackend:
    """Connects all ranks that have this store.

    Args:
        store: torch's, for these ranks alone.
        rank, world_size: among them.
        timeout: seconds that calls wait.
        connect_timeout: seconds that the ranks have to find each other.

    Raises:
        ConnectError, AuthenticationError: the ranks did not all find each other.
        LaunchError: ECHELON_SECRET or ECHELON_INTERFACE makes no sense.
    """
    if world_size == 1:
        return TcpBackend(0, 1, "", timeout=timeout, secret=b"")
    place = with_local_address(_environment(store, rank, world_size), os.environ)
    call = store.add(f"echelon/calls of rank {rank}", 1)  # a program may do this more than once
    keys = PrefixStore(f"echelon/call {call}", store)
    return TcpBackend.from_store(
        rank,
        world_size,
        keys,
        place.master_addr,
        timeout=timeout,
        secret=place.secret or shared_secret(rank, keys),
        local_address=place.local_address,
        connect_timeout=connect_timeout,
    )


def connect_default_group(timeout: float, connect_timeout: float) -> TcpBackend:
    """Connects the ranks of torch's default group; see `connect_ranks`."""
    world = dist.group.WORLD
    assert world is not None
    store = world.get_group_store()
    return connect_ranks(store, dist.get_rank(), dist.get_world_size(), timeout, connect_timeout)


def shared_secret(rank: int, store: Store) -> bytes:
    """Returns a secret that rank 0 makes and puts into a store, where the other ranks find it.

    Raises:
        ConnectError: rank 0 has not put it there within the time of the store.
    """
    if rank == 0:
        store.set("secret", secrets.token_hex(32))
    try:
        return bytes(store.get("secret"))
    except RuntimeError as error:
        raise ConnectError(f"rank {rank} waited in vain for rank 0 in torch's store: check rank 0") from error


def _environment(store: Store, rank: int, world_size: int) -> Environment:
    """Returns what is known of where the ranks are; a store that is a file has no address, then MASTER_ADDR has it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host, port = os.environ.get("MASTER_ADDR") or _HERE[0], 0
    if isinstance(store, TCPStore):
        host, port = store.host, store.port
    return Environment(
        rank,
        world_size,
        local_rank=0,
        local_world_size=1,
        master_addr=host,
        master_port=port,
        secret=environment.read_secret(os.environ),
        is_one_host=host in _HERE or os.environ.get("LOCAL_WORLD_SIZE") == str(world_size),
    )
