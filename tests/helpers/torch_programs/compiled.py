"""Programs with torch.compile, of models in DDP and FSDP2."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.torch_programs.common import Result, digest, mlp, program, train

WIDE = 512
"""Width at which each layer has a bucket of its own, of a mebibyte: torch divides the graph there."""


@program
def compiled_ddp(rank, world_size):
    model = torch.compile(DistributedDataParallel(mlp(WIDE), bucket_cap_mb=1))
    losses, _ = train(model, rank, width=WIDE)
    return Result(losses, digest(model.parameters()))


@program
def compiled_inside_ddp(rank, world_size):
    model = DistributedDataParallel(torch.compile(mlp(WIDE)), bucket_cap_mb=1)
    losses, _ = train(model, rank, width=WIDE)
    return Result(losses, digest(model.parameters()))


@program
def compiled_fsdp2(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    model = mlp()
    for layer in model:
        layer.compile()
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses, _ = train(model, rank)
    return Result([losses, digest(model.parameters())])


@program
def compiled_whole_fsdp2(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    model = mlp()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    model = torch.compile(fully_shard(model, mesh=mesh))
    losses, _ = train(model, rank)
    return Result([losses, digest(model.parameters())])
