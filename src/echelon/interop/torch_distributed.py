"""Registration of "echelon" as a backend of torch.distributed: import it, then `dist.init_process_group("echelon")`.

Programs on torch.distributed then run on Echelon's own backends unchanged: shared memory between the ranks of one host,
TCP between hosts; `ECHELON_BACKEND` chooses. "cpu:echelon,cuda:nccl" leaves CUDA tensors to NCCL. See docs/interop.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from echelon._torch_private import DistributedBackendOptions, all_gather_into, register_work, resolve_process_group
from echelon.interop.process_group import EchelonProcessGroup
from echelon.interop.world import connect, subgroup

# Functional collectives (`torch.ops._c10d_functional`, used by DTensor and torch.compile) are C++ that calls methods of
# the group. These calls reach a group written in Python, except from two operators. So the two get kernels in Python,
# which work for groups of any backend.

_library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call] # its kernels are gone when it is


def carry_functional_collectives() -> None:
    """Registers Python kernels for the two operators. Called once, at the import."""
    _library.impl("batch_p2p_ops", _batch, "CPU")  # type: ignore[no-untyped-call]
    for device in ("CPU", "CUDA"):
        _library.impl("all_gather_into_tensor_out", _all_gather_out, device)  # type: ignore[no-untyped-call]


def _all_gather_out(
    input: Tensor,
    group_size: int,  # noqa: ARG001
    group_name: str | dist.ProcessGroup,
    *,
    out: Tensor,
) -> Tensor:
    register_work(out, all_gather_into(resolve_process_group(group_name), out, input))
    return out


def _batch(
    op_list: Sequence[str],
    peer_list: Sequence[int],
    tag_list: Sequence[int],
    tensors: Sequence[Tensor],
    group_name: str,
) -> list[Tensor]:
    """Starts sends and receives one by one. The kernel is for CPU tensors only: NCCL must start a batch at once."""
    operators = torch.ops._c10d_functional
    starts = {"isend": operators.isend, "irecv": operators.irecv}
    messages = zip(op_list, tensors, peer_list, tag_list, strict=True)
    return [starts[kind](tensor, peer, tag, group_name) for kind, tensor, peer, tag in messages]


__all__ = ["NAME", "EchelonProcessGroup"]

NAME = "echelon"
"""Name of the backend in `torch.distributed.init_process_group` and `new_group`."""


def _make(options: DistributedBackendOptions, _: object) -> EchelonProcessGroup:
    """Makes a group for torch. Called by its members only. The first group connects them."""
    timeout = options.timeout.total_seconds()
    ranks, world = options.global_ranks_in_group, dist.group.WORLD
    # A later group of an Echelon world needs no connections of its own.
    if ranks and isinstance(world, EchelonProcessGroup):
        group = subgroup(world.group, ranks, timeout, name=options.group_id)
    else:
        group = connect(options.store, options.group_rank, options.group_size, timeout)
    return EchelonProcessGroup(group, options.store)


dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])
carry_functional_collectives()
