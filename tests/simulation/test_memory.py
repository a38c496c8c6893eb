"""Each rank's tensors are counted while they live, wherever they were made."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, zeros

import echelon
from echelon.pipeline import Pipeline


def hold(group):
    """Rank r holds r + 1 tensors of 4000 bytes at once, and views of them."""
    held = [torch.ones(1000) for _ in range(group.rank + 1)]
    views = [tensor.view(10, 100)[2:] for tensor in held]
    del held, views
    group.barrier()
    return torch.ones(500)


def test_the_most_bytes_held_at_one_time_count():
    assert echelon.simulate(hold, 3, memory=True).peak_memory == (4000, 8000, 12000)


def test_memory_is_not_measured_unless_asked_for():
    assert echelon.simulate(hold, 2).peak_memory is None


def pass_on(group):
    if group.rank == 0:
        group.send(torch.ones(1000), 1)
        group.recv(1)
    else:
        got = group.recv(0)
        del got
        group.send(torch.ones(1), 0)


def test_a_message_is_the_receivers():
    assert echelon.simulate(pass_on, 2, memory=True).peak_memory == (4000, 4000)


def pipeline(group, schedule):
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(group.world_size)])
    pipe = Pipeline(layers, group, schedule, 16, nn.functional.mse_loss)
    batch = torch.ones(16 * 128, 8)
    pipe.step(batch, target=batch)


def test_1f1b_holds_less_than_gpipe():
    gpipe, one_f_one_b = (echelon.simulate(pipeline, 4, (name,), memory=True).peak_memory for name in ("gpipe", "1f1b"))
    assert all(less < more for less, more in zip(one_f_one_b[1:], gpipe[1:], strict=True))
    assert list(one_f_one_b[1:3]) == sorted(one_f_one_b[1:3], reverse=True)


def train(group):
    torch.manual_seed(0)
    ddp = echelon.DDP(nn.Linear(64, 64), group)
    ddp(torch.ones(4, 64)).sum().backward()
    return ddp.weight.grad


def test_counting_changes_no_result_and_sees_what_runs_beside():
    plain, counted = echelon.simulate(train, 3), echelon.simulate(train, 3, memory=True)
    assert all(torch.equal(left, right) for left, right in zip(plain.results, counted.results, strict=True))
    assert plain.trace == counted.trace
    parameters = 4 * (64 * 64 + 64)
    assert all(3 * parameters < peak < 8 * parameters for peak in counted.peak_memory)


LAYER = 4 * 256 * 256
"""Bytes of one layer of `shard`."""


def shard(num_layers):
    dist.init_process_group("gloo")
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(num_layers)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model(torch.ones(1, 256))


def test_fsdp2_takes_its_shards_and_the_layers_that_are_unsharded():
    for world_size in (2, 4):
        shards = 8 * LAYER // world_size
        # Two gathered buffers and one layer at a time, as torch's profiler counts on two processes with Gloo.
        most = shards + 3 * LAYER
        for peak in echelon.simulate(shard, world_size, (8,), memory=True).peak_memory:
            assert most <= peak < most + LAYER // 4


def train_sharded():
    dist.init_process_group("gloo")
    model = nn.Linear(64, 64)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    return model.weight.to_local().detach()


def test_counting_changes_no_result_of_fsdp2():
    plain, counted = (echelon.simulate(train_sharded, 2, memory=memory).results for memory in (False, True))
    assert all(map(torch.equal, plain, counted))


def add_dtensors():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return (zeros(256, 256, device_mesh=mesh, placements=[Shard(0)]) + 1).shape


def test_a_dtensor_takes_its_local_part():
    for world_size in (2, 4):
        for peak in echelon.simulate(add_dtensors, world_size, memory=True).peak_memory:
            assert 2 * LAYER // world_size <= peak < 2 * LAYER // world_size + LAYER // 8


def redistribute(before, after):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.ones(256 if before.is_partial() else 64, 256)
    whole = DTensor.from_local(local, mesh, [before], run_check=False)
    return whole.redistribute(placements=[after]).to_local().sum().item()


@pytest.mark.parametrize(
    ("before", "after", "most", "total"),
    [
        # This rank's part, the gathered one, and torch's copy of it.
        (Shard(0), Replicate(), 2.25, 256.0 * 256),
        # This rank's summand, its part of the sum, and torch's copy of that.
        (Partial(), Shard(0), 1.5, 4 * 256.0 * 64),
    ],
)
def test_a_dtensor_is_redistributed_without_copies_of_the_library(before, after, most, total):
    """It took 4.25 and 2.75: one tensor was packed as several are, and the simulation's own values counted."""
    outcome = echelon.simulate(redistribute, 4, (before, after), memory=True)
    assert outcome.results == [total] * 4
    assert all(peak < (most + 1 / 8) * LAYER for peak in outcome.peak_memory)


def resize():
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    other = torch.ones(1500)
    del other
    tensor.untyped_storage().resize_(8000)


def test_a_resized_storage_counts_with_its_new_size():
    before = torch.UntypedStorage.resize_
    assert echelon.simulate(resize, 2, memory=True).peak_memory == (8000, 8000)
    assert torch.UntypedStorage.resize_ is before


def sparsify():
    torch.ones(10, 100).to_sparse()


def test_a_sparse_tensor_takes_its_indices_and_values():
    (peak,) = echelon.simulate(sparsify, 1, memory=True).peak_memory
    assert 4000 + 1000 * (2 * 8 + 4) <= peak < 2 * 24000


def make_on_meta():
    torch.ones(1000, device="meta")


def test_a_tensor_of_the_meta_device_takes_nothing():
    assert echelon.simulate(make_on_meta, 1, memory=True).peak_memory == (0,)
