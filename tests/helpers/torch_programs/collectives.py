"""Programs of single calls: collectives, messages, groups, functional collectives and their gradients."""

import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

from tests.helpers.torch_programs.common import Result, digest, program


def _values(rank, count=6):
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


@program
def every_collective(rank, world_size):
    n, mine = world_size, _values(rank)
    own, everywhere = [], []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        total = mine.clone()
        dist.all_reduce(total, op)
        everywhere.append(total)
    root = mine.clone()
    dist.reduce(root, 1)
    own.append(root if rank == 1 else mine)
    sent = mine.clone()
    dist.broadcast(sent, n - 1)
    everywhere.append(sent)
    parts = [torch.empty(6) for _ in range(n)]
    dist.all_gather(parts, mine)
    everywhere += parts
    flat = torch.empty(6 * n)
    dist.all_gather_into_tensor(flat, mine)
    everywhere.append(flat)
    gathered = [torch.empty(6) for _ in range(n)] if rank == 0 else None
    dist.gather(mine, gathered, 0)
    own += gathered or []
    piece = torch.empty(6)
    dist.scatter(piece, parts if rank == 0 else None, 0)
    own.append(piece.clone())
    dist.reduce_scatter(piece, [part * (rank + 1) for part in parts])
    own.append(piece.clone())
    dist.reduce_scatter_tensor(piece, flat * (rank + 1))
    own.append(piece.clone())
    swapped = torch.empty(n)
    dist.all_to_all_single(swapped, torch.arange(float(n)) + 100 * rank)
    own.append(swapped)
    lists = [torch.empty(source + 1) for source in range(n)]
    dist.all_to_all(lists, [torch.full((rank + 1,), float(peer)) for peer in range(n)])
    own += lists
    dist.barrier()
    return Result(digest(own), digest(everywhere))


@program
def objects(rank, world_size):
    everyone = [None] * world_size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank})
    told = [("from", "zero"), 7] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, src=0)
    mine = [None]
    dist.scatter_object_list(mine, [f"for {peer}" for peer in range(world_size)] if rank == 0 else None, src=0)
    gathered = [None] * world_size if rank == 0 else None
    dist.gather_object(rank * rank, gathered, dst=0)
    return Result([mine, gathered], [everyone, told])


@program
def works_and_futures(rank, world_size):
    """Asynchronous collectives that end out of order, and callbacks on their futures."""
    tensors = [_values(rank) * number for number in range(1, 5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    doubled = works[0].get_future().then(lambda future: future.value()[0] * 2)
    for work in reversed(works):
        work.wait()
    chained = torch.futures.collect_all([work.get_future() for work in works[1:]])
    count = len(chained.wait())
    last = dist.all_reduce(tensors[0].clone(), async_op=True)
    while not last.is_completed():
        pass
    return Result(count, digest([*tensors, doubled.wait()]))


@program
def messages(rank, world_size):
    following, before = (rank + 1) % world_size, (rank - 1) % world_size
    got = torch.empty(6)
    sending = dist.isend(_values(rank), following)
    dist.recv(got, before)
    sending.wait()
    batch = [
        dist.P2POp(dist.isend, _values(rank) * 2, before),
        dist.P2POp(dist.irecv, torch.empty(6), following),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    own = [got, batch[1].tensor]
    if rank == 0:
        sources = []
        for _ in range(world_size - 1):
            any_values = torch.empty(1)
            sources.append(dist.recv(any_values, tag=3))
            assert any_values.item() == sources[-1]
        own.append(torch.tensor(sorted(sources)))
    else:
        dist.send(torch.tensor([float(rank)]), 0, tag=3)
    things = [None, None]
    if rank % 2 == 0 and rank + 1 < world_size:
        dist.send_object_list([rank, "even"], rank + 1)
    elif rank % 2 == 1:
        dist.recv_object_list(things, rank - 1)
    return Result([digest(own), things])


@program
def coalesced(rank, world_size):
    tensors = [_values(rank) * number for number in range(1, 4)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    shards = [torch.full((2,), float(rank + number)) for number in range(3)]
    wholes = [torch.empty(2 * world_size) for _ in shards]
    with dist._coalescing_manager():
        for whole, shard in zip(wholes, shards, strict=True):
            dist.all_gather_into_tensor(whole, shard)
    return Result(None, digest([*tensors, *wholes]))


@program
def groups(rank, world_size):
    """Groups that overlap, one of one rank, and one that only its members make."""
    # First: torch puts the number of a rank's own groups into the name of a group that only members make.
    half = sorted(peer for peer in range(world_size) if (peer < world_size // 2) == (rank < world_size // 2))
    local = dist.new_group(half, use_local_synchronization=True)
    evens = dist.new_group(list(range(0, world_size, 2)))
    first_two = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    alone = [dist.new_group([peer]) for peer in range(world_size)][rank]
    mine, others = dist.new_subgroups(2)
    own = [dist.get_process_group_ranks(local), dist.get_rank(evens), dist.get_world_size(mine), len(others)]
    for group in (evens, first_two, alone, local, mine):
        total = _values(rank)
        if dist.get_rank(group) >= 0:
            dist.all_reduce(total, group=group)
        own.append(digest([total]))
    dist.destroy_process_group(local)
    total = _values(rank)
    dist.all_reduce(total)
    return Result(own, digest([total]))


@program
def functional_collectives(rank, world_size):
    n, mine, group = world_size, _values(rank, 2 * world_size), dist.group.WORLD
    everywhere = [functional.all_reduce(mine, op, group) for op in ("sum", "avg", "max")]
    everywhere += functional.all_reduce_coalesced([mine, mine * 2], "sum", group)
    everywhere += [functional.all_gather_tensor(mine, 0, group), functional.broadcast(mine, n - 1, group)]
    own = [functional.reduce_scatter_tensor(mine, "sum", 0, group)]
    own += functional.reduce_scatter_tensor_coalesced([mine, mine * 3], "sum", [0, 0], group)
    own += [functional.all_to_all_single(mine, None, None, group)]
    own += [functional.permute_tensor(mine, [(peer + 1) % n for peer in range(n)], group)]
    # The values are waited for where they are first used.
    later = functional.all_reduce(mine, "sum", group) + functional.all_reduce(mine * 2, "sum", group)
    own, everywhere = ([functional.wait_tensor(each) for each in values] for values in (own, everywhere))
    return Result(digest(own), digest([*everywhere, later]))


@program
def gradients_of_collectives(rank, world_size):
    """Collectives inside of autograd, whose backward communicates."""
    n, group = world_size, dist.group.WORLD
    own = []
    for call in (
        lambda values: differentiable.all_reduce(values),
        lambda values: differentiable.broadcast(values, 0),
        lambda values: torch.stack(differentiable.all_gather(values)),
        lambda values: differentiable.reduce_scatter(torch.empty(2), list(values.view(n, 2))),
        lambda values: torch.stack(
            differentiable.all_to_all([torch.empty(2) for _ in range(n)], list(values.view(n, 2)))
        ),
        lambda values: functional.all_gather_tensor_autograd(values, 0, group),
        lambda values: functional.reduce_scatter_tensor_autograd(values, "sum", 0, group),
        lambda values: functional.all_to_all_single_autograd(values, [2] * n, [2] * n, group),
    ):
        values = _values(rank, 2 * n).requires_grad_()
        result = call(values * 1)
        (result * torch.arange(1.0, result.numel() + 1).reshape(result.shape) * (rank + 1)).sum().backward()
        own += [result, values.grad]
    return Result([digest([each]) for each in own])


@program
def state_of_the_process(rank, world_size):
    """Random states, dtypes and modes that torch keeps once per process, each set otherwise by every rank."""
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    torch.set_default_dtype(torch.float64 if rank % 2 else torch.float32)
    torch.set_grad_enabled(rank % 2 == 0)
    torch.use_deterministic_algorithms(rank % 2 == 0)
    torch.set_autocast_enabled("cpu", rank % 2 == 1)
    own = []
    for _ in range(3):
        dist.barrier()
        with torch.autocast("cpu", enabled=rank % 2 == 1):
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        own.append([torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random(), str(torch.ones(1).dtype)])
        own.append([str(product.dtype), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")])
        own.append(torch.are_deterministic_algorithms_enabled())
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_autocast_enabled("cpu", False)
    return Result(own)
