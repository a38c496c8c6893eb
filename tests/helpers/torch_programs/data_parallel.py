"""Programs with DistributedDataParallel, ZeroRedundancyOptimizer and SyncBatchNorm."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.helpers.torch_programs.common import Result, batches, digest, mlp, program, state_digest, train

SMALL = 0.0005
"""Megabytes of a bucket: each layer has its own."""


def _trained(ddp, rank, **options):
    losses, optimizer = train(ddp, rank, **options)
    return Result(losses, (digest(ddp.parameters()), state_digest(optimizer)))


@program
def ddp(rank, world_size):
    return _trained(DistributedDataParallel(mlp(), bucket_cap_mb=SMALL), rank)


@program
def ddp_bucket_view(rank, world_size):
    return _trained(DistributedDataParallel(mlp(), bucket_cap_mb=SMALL, gradient_as_bucket_view=True), rank)


@program
def ddp_own_hook(rank, world_size):
    model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL)

    def in_half(group, bucket):
        half = bucket.buffer().bfloat16().div_(world_size)
        future = dist.all_reduce(half, group=group, async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    model.register_comm_hook(None, in_half)
    return _trained(model, rank)


@program
def ddp_two_rounds_hook(rank, world_size):
    """A hook that starts a collective when its first has ended. One bucket: the order of callbacks is not agreed."""
    model = DistributedDataParallel(mlp())

    def scatter_then_gather(_, bucket):
        values = bucket.buffer()
        padded = torch.zeros(-(-values.numel() // world_size) * world_size)
        padded[: values.numel()] = values / world_size
        part = torch.empty(padded.numel() // world_size)

        def gather(done):
            dist.all_gather_into_tensor(padded, part)
            return values.copy_(padded[: values.numel()])

        return dist.reduce_scatter_tensor(part, padded, async_op=True).get_future().then(gather)

    model.register_comm_hook(None, scatter_then_gather)
    return _trained(model, rank)


@program
def ddp_half_precision_hooks(rank, world_size):
    """The hooks of torch that run on the CPU; it refuses bfloat16 there."""
    results = []
    for hook in (
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ):
        torch.manual_seed(0)
        model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL)
        model.register_comm_hook(None, hook)
        results.append(_trained(model, rank))
    return Result([result.own for result in results], [result.everywhere for result in results])


@program
def ddp_power_sgd(rank, world_size):
    model = DistributedDataParallel(mlp())  # one bucket, as above
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return _trained(model, rank, steps=4)


@program
def ddp_post_local_sgd(rank, world_size):
    model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL)
    state = post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(2)[0], start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    losses, _ = train(model, rank, steps=5, optimizer=optimizer)
    return Result([losses, digest(model.parameters())])


@program
def ddp_no_sync(rank, world_size):
    model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number, inputs in enumerate(batches(rank, 6)):
        with contextlib.nullcontext() if number % 3 == 2 else model.no_sync():
            loss = model(inputs).square().mean()
            loss.backward()
        losses.append(loss.item())
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return Result(losses, digest(model.parameters()))


class Branches(nn.Module):
    """Model that uses one of two branches for each batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = mlp(depth=1), mlp(depth=1), mlp(depth=1)

    def forward(self, inputs, takes_first):
        return self.last((self.first if takes_first else self.second)(inputs))


@program
def ddp_unused_parameters(rank, world_size):
    """Ranks use different branches, and in one step all use the same."""
    model = DistributedDataParallel(Branches(), bucket_cap_mb=SMALL, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for number, inputs in enumerate(batches(rank, 4)):
        loss = model(inputs, number == 3 or (rank + number) % 2 == 0).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, (digest(model.parameters()), state_digest(optimizer)))


class Recomputed(nn.Module):
    """Model with reentrant checkpoints, which use its layer twice."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = mlp(depth=1), mlp(depth=1)

    def forward(self, inputs):
        hidden = checkpoint(self.layer, self.first(inputs), use_reentrant=True)
        return checkpoint(self.layer, hidden, use_reentrant=True)


@program
def ddp_static_graph(rank, world_size):
    model = DistributedDataParallel(Recomputed(), bucket_cap_mb=SMALL, static_graph=True)
    return _trained(model, rank)


@program
def ddp_join(rank, world_size):
    """Ranks have different numbers of batches."""
    model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with model.join(divide_by_initial_world_size=False):
        for inputs in batches(rank, 2 + rank % 3):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return Result(losses, digest(model.parameters()))


class Normed(nn.Module):
    """Model with buffers, and with dropout that each rank draws for itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(mlp(depth=1), nn.BatchNorm1d(16), nn.Dropout(0.3), mlp(depth=1))

    def forward(self, inputs):
        return self.layers(inputs)


@program
def ddp_buffers_and_dropout(rank, world_size):
    model = DistributedDataParallel(Normed(), bucket_cap_mb=SMALL)
    torch.manual_seed(100 + rank)
    losses, _ = train(model, rank)
    draws = torch.rand(3).tolist()
    dist.barrier()  # afterwards a rank has its own state again
    return Result([losses, draws, torch.rand(3).tolist(), digest(model.buffers())], digest(model.parameters()))


@program
def ddp_mixed_precision(rank, world_size):
    model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for inputs in batches(rank, 3):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(inputs)
            loss = outputs.float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result([losses, str(outputs.dtype)], digest(model.parameters()))


@program
def ddp_of_subgroups(rank, world_size):
    """Two models in groups of their own, each with half of the ranks."""
    halves = [dist.new_group(list(range(half, world_size, 2))) for half in range(2)]
    model = DistributedDataParallel(mlp(), process_group=halves[rank % 2], bucket_cap_mb=SMALL)
    losses, optimizer = train(model, rank)
    parameters = digest(model.parameters())
    gathered = [None] * world_size
    dist.all_gather_object(gathered, parameters)
    return Result([losses, parameters, state_digest(optimizer)], [gathered, len(set(gathered))])


@program
def zero(rank, world_size):
    model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    losses, _ = train(model, rank, optimizer=optimizer)
    optimizer.consolidate_state_dict(to=0)
    whole = optimizer.state_dict()["state"] if rank == 0 else {}
    moments = digest(value for state in whole.values() for value in state.values())
    return Result([losses, moments], digest(model.parameters()))


@program
def zero_bucket_view_and_join(rank, world_size):
    model = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, lr=0.1)
    losses = []
    with Join([model, optimizer]):
        for inputs in batches(rank, 2 + rank % 2):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return Result(losses, digest(model.parameters()))


@program
def sync_batch_norm(rank, world_size):
    """torch lets it run on the CPU where it need not communicate, and refuses it elsewhere."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Normed())
    refusals = []
    for attempt in (model, DistributedDataParallel):
        try:
            attempt(batches(rank, 1)[0] if attempt is model else model)
        except ValueError as error:
            refusals.append(str(error))
    losses, _ = train(model.eval(), rank)
    return Result([losses, digest(model.parameters())], [refusals, digest(model.buffers())])
