"""Makes "echelon" a backend of torch.distributed: `dist.init_process_group("echelon")`, once this is imported.

What calls torch.distributed then runs on Echelon's own backends unchanged: shared memory between the ranks of one host,
TCP between hosts; `ECHELON_BACKEND` chooses. "cpu:echelon,cuda:nccl" leaves CUDA tensors to NCCL. See docs/interop.md.
"""

from __future__ import annotations

import torch.distributed as dist

from echelon._torch_private import DistributedBackendOptions
from echelon.interop.functional import carry_functional_collectives
from echelon.interop.process_group import EchelonProcessGroup
from echelon.interop.world import connect, subgroup

__all__ = ["NAME", "EchelonProcessGroup"]

NAME = "echelon"
"""What the backend is called in `torch.distributed.init_process_group` and `new_group`."""


def _make(options: DistributedBackendOptions, _: object) -> EchelonProcessGroup:
    """Makes a group for torch; every member calls it, and nobody else."""
    timeout = options.timeout.total_seconds()
    ranks, world = options.global_ranks_in_group, dist.group.WORLD
    if ranks and isinstance(world, EchelonProcessGroup):
        group = subgroup(world.group, ranks, timeout, name=options.group_id)
    else:
        group = connect(options.store, options.group_rank, options.group_size, timeout)
    return EchelonProcessGroup(group, options.store)


dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])
carry_functional_collectives()
