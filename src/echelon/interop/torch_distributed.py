"""Registration of "echelon" as a backend of torch.distributed: import it, then `dist.init_process_group("echelon")`.

Programs on torch.distributed then run on Echelon's own backends unchanged: shared memory between the ranks of one host,
TCP between hosts; `ECHELON_BACKEND` chooses. "cpu:echelon,cuda:nccl" leaves CUDA tensors to NCCL. See docs/interop.md.

torch's first group connects its ranks. They exchange addresses and a secret over torch's store, which neither
authenticates nor encrypts. `ECHELON_SECRET`, if set on all ranks, is used instead. Later groups of ranks of torch's
default group use its connections, each in a context of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined] # public, by its docs

from echelon._torch_private.distributed import (
    DistributedBackendOptions,
    all_gather_into,
    register_work,
    resolve_process_group,
)
from echelon.errors import LaunchError
from echelon.group.group import ProcessGroup, context_of
from echelon.interop.process_group import EchelonProcessGroup
from echelon.launch import environment
from echelon.launch.backends import OWN_NAMES
from echelon.launch.init import carry, end_with_program, provided_group
from echelon.launch.torch_store import connect_ranks
from echelon.launch.tuned import agreed_table

__all__ = ["NAME", "EchelonProcessGroup"]

NAME = "echelon"
"""Name of the backend in `torch.distributed.init_process_group` and `new_group`."""

# Most seconds to connect, since torch's store has already brought the ranks together.
_CONNECT_SECONDS = 300.0


def make_group(options: DistributedBackendOptions) -> tuple[ProcessGroup, Store]:
    """Returns Echelon's group for one of torch, and torch's store for it. Called by its members only.

    The first group connects them.

    Args:
        options: rank, size, store and timeout of the group, as torch gives them.
    """
    timeout = options.timeout.total_seconds()
    ranks, world = options.global_ranks_in_group, dist.group.WORLD
    # A later group of an Echelon world needs no connections of its own.
    if ranks and isinstance(world, EchelonProcessGroup):
        # Simulated ranks do not wait in real time: there, only the timeout of a single call counts.
        is_simulated = world.group.backend.name == "simulated"
        group = _subgroup(world, ranks, world.group.timeout if is_simulated else timeout, options.group_id)
    else:
        group = _connect(options.store, options.group_rank, options.group_size, timeout)
    return group, options.store


def _subgroup(world: EchelonProcessGroup, ranks: Sequence[int], timeout: float, name: str) -> ProcessGroup:
    """Returns the group of some ranks of the world, without communication. Only its members call it."""
    # A hash, since only the members call: ranks with different numbers of groups could not agree on a counter. torch's
    # name of a group is equal on its members, and unique in the world.
    context = context_of(f"torch group {name}")
    # Errors show its ranks, which the program knows. It has never seen torch's name, a number or a hash.
    shown, group = world.name_for(ranks), world.group
    return ProcessGroup(group.backend, ranks, context=context, timeout=timeout, name=shown, table=group.table)


def _connect(store: Store, rank: int, world_size: int, timeout: float) -> ProcessGroup:
    """Connects all ranks of a store and returns their group. Blocks until all are connected.

    Simulated ranks are connected already.

    Raises:
        ConnectError, AuthenticationError: the ranks did not all find each other.
        LaunchError: ECHELON_BACKEND, ECHELON_SECRET or ECHELON_TUNED has an invalid value.
    """
    provided = provided_group()
    if provided is not None and provided.backend.name == "simulated":
        # A group beside that of the program's own calls of Echelon. It has the timeout of the simulation.
        group = provided.subgroup(range(world_size), name=provided.name)
        assert group is not None, "every rank is in the group of all"
        return group
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


# Functional collectives (`torch.ops._c10d_functional`, used by DTensor and torch.compile) are C++ that calls methods of
# the group. These calls reach a group written in Python, except from two operators. So the two get kernels in Python,
# which work for groups of any backend.

_library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call] # its kernels are gone when it is


def _all_gather_out(input: Tensor, _: int, group: str | dist.ProcessGroup, *, out: Tensor) -> Tensor:
    register_work(out, all_gather_into(resolve_process_group(group), out, input))
    return out


def _batch(
    ops: Sequence[str], peers: Sequence[int], tags: Sequence[int], tensors: Sequence[Tensor], group: str
) -> list[Tensor]:
    """Starts sends and receives one by one. The kernel is for CPU tensors only: NCCL must start a batch at once."""
    starts = {"isend": torch.ops._c10d_functional.isend, "irecv": torch.ops._c10d_functional.irecv}
    messages = zip(ops, tensors, peers, tags, strict=True)
    return [starts[kind](tensor, peer, tag, group) for kind, tensor, peer, tag in messages]


_library.impl("batch_p2p_ops", _batch, "CPU")  # type: ignore[no-untyped-call]
for _device in ("CPU", "CUDA"):
    _library.impl("all_gather_into_tensor_out", _all_gather_out, _device)  # type: ignore[no-untyped-call]
dist.Backend.register_backend(
    NAME, lambda options, _: EchelonProcessGroup(*make_group(options)), extended_api=True, devices=["cpu"]
)
