"""Opens the Echelon group behind one of torch's groups, through the store that torch gives it.

The first group connects its ranks: they exchange addresses and a secret over the store, which asks nobody who they are
and hides nothing; `ECHELON_SECRET`, where it is set on all ranks, is used instead. Groups that torch makes later of
ranks of its default group use the connections of that one, each in a context of its own.
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
"""The longest that ranks wait for each other, which torch's store has already brought together."""


def subgroup(world: ProcessGroup, ranks: Sequence[int], timeout: float, name: str) -> ProcessGroup:
    """Returns the group of some ranks of the world. Only its members call it.

    Args:
        world: whose connections it uses.
        ranks: the members, in the order that they are to have in the new group.
        timeout: seconds that its calls wait.
        name: the same on all members, and unlike that of any other group of this world.
    """
    return ProcessGroup(world.backend, ranks, context=_context_of(name), timeout=timeout, name=name, table=world.table)


def connect(store: Store, rank: int, world_size: int, timeout: float) -> ProcessGroup:
    """Connects all ranks that have this store, and returns their group.

    Args:
        store: torch's, for these ranks alone.
        rank, world_size: among them.
        timeout: seconds that the group's calls wait.

    Raises:
        ConnectError, AuthenticationError: the ranks did not all find each other.
        LaunchError: ECHELON_BACKEND, ECHELON_SECRET or ECHELON_TUNED make no sense.
    """
    name = environment.read_backend(os.environ, "auto")
    if name not in OWN_NAMES:
        raise LaunchError(
            f"ECHELON_BACKEND={name} under torch.distributed: use one of {', '.join(OWN_NAMES)}, or unset it"
        )
    seconds = min(timeout, _CONNECT_SECONDS)
    tcp = connect_ranks(store, rank, world_size, timeout, seconds)
    table = agreed_table(tcp, seconds)
    tcp.keep_silent()  # torch allows ranks to end with different calls
    group = ProcessGroup(carry(tcp, name, seconds), table=table)
    end_with_program(group)
    return group


def _context_of(name: str) -> int:
    """Returns the context of the group of that name: the same on every rank, and unlike any other's."""
    digest = hashlib.blake2b(f"torch group {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1 << 63
