"""Tensors and modules of torch that are sharded over a mesh of one process, which is this one."""

import contextlib

import torch.distributed as dist


@contextlib.contextmanager
def mesh_of_one():
    """Gives a mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh  # takes a second

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
