"""Programs with FSDP1 (FullyShardedDataParallel) and FSDP2 (fully_shard)."""

import functools
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.helpers.torch_programs.common import Result, batches, digest, mlp, program, state_digest, train

_fsdp1 = functools.partial(
    FullyShardedDataParallel,
    device_id=torch.device("cpu"),
    auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
)


def _trained_fsdp1(model, rank, **options):
    losses, optimizer = train(model, rank, **options)
    with FullyShardedDataParallel.summon_full_params(model):
        whole = digest(model.parameters())
    return Result([losses, digest(model.parameters()), state_digest(optimizer)], whole)


@program
def fsdp1(rank, world_size):
    return _trained_fsdp1(_fsdp1(mlp()), rank)


@program
def fsdp1_original_parameters(rank, world_size):
    return _trained_fsdp1(_fsdp1(mlp(), use_orig_params=True), rank)


@program
def fsdp1_mixed_precision_and_clipping(rank, world_size):
    policy = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    model = _fsdp1(mlp(), mixed_precision=policy)
    norms = []
    result = _trained_fsdp1(model, rank, before_step=lambda: norms.append(model.clip_grad_norm_(0.05).item()))
    return Result(result.own, [result.everywhere, norms])


@program
def fsdp1_prefetch(rank, world_size):
    options = [
        {"forward_prefetch": True, "backward_prefetch": BackwardPrefetch.BACKWARD_PRE, "limit_all_gathers": True},
        {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "limit_all_gathers": False},
        {"backward_prefetch": None},
    ]
    results = []
    for each in options:
        torch.manual_seed(0)
        results.append(_trained_fsdp1(_fsdp1(mlp(), **each), rank))
    return Result([result.own for result in results], [result.everywhere for result in results])


@program
def fsdp1_strategies(rank, world_size):
    results = []
    for strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        torch.manual_seed(0)
        results.append(_trained_fsdp1(_fsdp1(mlp(), sharding_strategy=strategy), rank))
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    hybrid = _fsdp1(mlp(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    results.append(_trained_fsdp1(hybrid, rank))
    return Result([result.own for result in results], [result.everywhere for result in results])


@program
def fsdp1_no_sync_and_state(rank, world_size):
    model = _fsdp1(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    first, second = batches(rank, 2)
    with model.no_sync():
        losses.append(model(first).square().mean())
        losses[-1].backward()
    losses.append(model(second).square().mean())
    losses[-1].backward()
    optimizer.step()
    weights = model.state_dict()
    moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    whole = digest(weights.values()), sorted(moments["state"])
    return Result([loss.item() for loss in losses], whole)


def sharded(mesh, **options):
    """Returns a model with the weights of the present seed, each layer and the whole sharded by FSDP2."""
    model = mlp()
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _trained(model, rank, **options):
    losses, optimizer = train(model, rank, **options)
    mine = digest(model.parameters()), state_digest(optimizer)
    return Result([losses, mine], digest(parameter.full_tensor() for parameter in model.parameters()))


@program
def fsdp2(rank, world_size):
    return _trained(sharded(init_device_mesh("cpu", (world_size,))), rank)


@program
def fsdp2_without_mesh(rank, world_size):
    return _trained(sharded(None), rank)


@program
def fsdp2_mixed_precision(rank, world_size):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    return _trained(sharded(init_device_mesh("cpu", (world_size,)), mp_policy=policy), rank)


@program
def fsdp2_reshard(rank, world_size):
    """Whether the weights are freed after the forward: always, never, or down to the shards of two ranks."""
    results = []
    for reshards in (True, False, *([2] if world_size > 2 else [])):
        torch.manual_seed(0)
        model = sharded(init_device_mesh("cpu", (world_size,)), reshard_after_forward=reshards)
        results.append(_trained(model, rank))
    return Result([result.own for result in results], [result.everywhere for result in results])


@program
def fsdp2_prefetch(rank, world_size):
    model = sharded(init_device_mesh("cpu", (world_size,)))
    for layer, following in itertools.pairwise(model):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
    return _trained(model, rank)


@program
def fsdp2_clipping(rank, world_size):
    model = sharded(init_device_mesh("cpu", (world_size,)))
    norms = []

    def clip():
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        norms.append(norm.full_tensor().item())

    result = _trained(model, rank, before_step=clip)
    return Result(result.own, [result.everywhere, norms])


@program
def fsdp2_accumulation(rank, world_size):
    model = sharded(init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    losses = []
    for number, inputs in enumerate(batches(rank, 4)):
        is_last = number % 2 == 1
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
        loss = model(inputs).square().mean()
        loss.backward()
        losses.append(loss.item())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return Result([losses, digest(model.parameters()), state_digest(optimizer)])


@program
def fsdp2_hybrid(rank, world_size):
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    return _trained(sharded(mesh), rank)


@program
def fsdp2_offload(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    return _trained(sharded(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)), rank)


@program
def fsdp2_of_meta(rank, world_size):
    """A model that gets its memory after it was sharded."""
    with torch.device("meta"):
        model = mlp()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(0.0, 0.1, generator=generator)
    dist.barrier()
    return _trained(model, rank)
