"""Echelon groups behind torch's groups, connected through torch's store.

The first group connects its ranks: they exchange addresses and a secret over the store, which neither authenticates nor
encrypts. `ECHELON_SECRET`, if set on all ranks, is used instead. Later groups of ranks of torch's default group use its
connections, each in a context of its own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from torch.distributed import Store  # type: ignore[attr-defined] # public, by its docs

from echelon.errors import LaunchError
from echelon.group.group import ProcessGroup
from echelon.launch import environment
from echelon.launch.backends import OWN_NAMES
from echelon.launch.init import carry, end_with_program
from echelon.launch.torch_store import connect_ranks
from echelon.launch.tuned import agreed_table

_CONNECT_SECONDS = 300.0
"""Most seconds to connect, since torch's store has already brought the ranks together."""


def subgroup(world: ProcessGroup, ranks: Sequence[int], timeout: float, name: str) -> ProcessGroup:
    """Returns the group of some ranks of the world, without communication. Only its members call it.

    Args:
        world: the group whose connections it uses.
        ranks: the members, in the order of the new group.
        timeout: seconds that its calls wait.
        name: equal on all members, and unique among the groups of this world.
    """
    return ProcessGroup(world.backend, ranks, context=_context_of(name), timeout=timeout, name=name, table=world.table)


def connect(store: Store, rank: int, world_size: int, timeout: float) -> ProcessGroup:
    """Connects all ranks of a store and returns their group. Blocks until all are connected.

    Args:
        store: torch's store, used by these ranks only.
        rank, world_size: this rank and the number of all.
        timeout: seconds that the group's calls wait.

    Raises:
        ConnectError, AuthenticationError: the ranks did not all find each other.
        LaunchError: ECHELON_BACKEND, ECHELON_SECRET or ECHELON_TUNED has an invalid value.
    """
    name = environment.read_backend(os.environ, "auto")
    if name not in OWN_NAMES:
        raise LaunchError(
            f"ECHELON_BACKEND={name} under torch.distributed: use one of {', '.join(OWN_NAMES)}, or unset it"
        )
    seconds = min(timeout, _CONNECT_SECONDS)
    tcp = connect_ranks(store, rank, world_size, timeout, seconds)
    table = agreed_table(tcp, seconds)
    tcp.control.keep_silent()  # torch allows ranks to end with different calls
    group = ProcessGroup(carry(tcp, name, seconds), table=table)
    end_with_program(group)
    return group


def _context_of(name: str) -> int:
    """Returns the context of a group by its name: equal on every rank, different from other groups'."""
    # A hash, since only the members call it: ranks with different numbers of groups could not agree on a counter.
    digest = hashlib.blake2b(f"torch group {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1 << 63
