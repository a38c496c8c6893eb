"""Runs functions as ranks of a default group of torch.distributed."""

from datetime import timedelta

import torch.distributed as dist

import echelon.interop.torch_distributed  # noqa: F401 # registers the backend

# The names of torch 2.13, and those of the versions before it.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def begin(group, path, backend="echelon", timeout=20.0):
    """Makes torch's default group of the ranks of `group`; a file stands in for torch's store."""
    dist.init_process_group(
        backend,
        store=dist.FileStore(path, group.world_size),
        rank=group.rank,
        world_size=group.world_size,
        timeout=timedelta(seconds=timeout),
    )


def as_default_group(group, path, backend, function, *arguments):
    """Returns what `function(rank, *arguments)` does while the default group is there."""
    begin(group, path, backend)
    try:
        return function(group.rank, *arguments)
    finally:
        dist.destroy_process_group()
