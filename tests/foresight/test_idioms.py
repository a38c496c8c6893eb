"""Idioms of training scripts that depend on values, on memory or on names of CUDA."""

import copy
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon import UnsupportedOp, foresee
from tests.foresight import programs


def steps(model, x, count=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


def draws_batches():
    data = np.arange(1000)
    starts = torch.randint(len(data) - 32, (4,))
    x = torch.stack([torch.from_numpy(data[each : each + 32]) for each in starts])
    assert x.shape == (4, 32)
    assert len(set(starts.tolist())) == 4
    assert sorted(torch.randperm(10).tolist()) == list(range(10))
    assert all(5 <= each < 8 for each in torch.randint(5, 8, (2, 9)).flatten().tolist())
    assert torch.tensor([3, 4])[1].item() == 4
    assert torch.tensor([[3, 4], [5, 6]]).sum(0).tolist() == [8, 10]
    steps(nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 8)).cuda(), x.cuda())


def copies_models():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).cuda()
    copied = copy.deepcopy(model)
    assert [each.shape for each in copied.parameters()] == [each.shape for each in model.parameters()]
    assert not {id(each) for each in copied.parameters()} & {id(each) for each in model.parameters()}
    assert copy.deepcopy(torch.tensor(3)).item() == 3
    twice = copy.deepcopy([model.layers[0].linear1.weight] * 2)
    assert twice[0] is twice[1]
    steps(copied, torch.randn(2, 4, 8, device="cuda"))


def makes_models_on_meta():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model.to_empty(device=torch.device("cuda", 0))
    assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))
    steps(model, torch.randn(2, 8, device="cuda"))


def draws_weights_within_bounds():
    model = nn.Linear(8, 8)
    nn.init.trunc_normal_(model.weight, std=0.02)
    nn.init.trunc_normal_(model.weight, mean=1.0, a=0.9, b=1.1)
    steps(model.cuda(), torch.randn(2, 8, device="cuda"))


def prefetches():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.randn(2, 8).cuda(non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    x.record_stream(torch.cuda.current_stream())
    torch.cuda.memory._record_memory_history()
    assert torch.version.cuda
    assert torch.backends.cudnn.is_available()
    assert torch.cuda.get_device_name() == "NVIDIA H100 80GB HBM3"
    steps(nn.Linear(8, 8).cuda(), x)


@pytest.mark.parametrize(
    "program", [draws_batches, copies_models, makes_models_on_meta, draws_weights_within_bounds, prefetches]
)
@pytest.mark.filterwarnings("ignore:mean is more than 2 std:UserWarning", "ignore:enable_nested_tensor:UserWarning")
def test_it_runs(program):
    version = torch.version.cuda
    assert foresee(program, 1, gpu="h100").step_seconds > 0
    assert torch.version.cuda == version


def normalizes(wrapped):
    device = programs.begin()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))).to(device)
    model = DistributedDataParallel(model, device_ids=[device.index]) if wrapped else model
    steps(model, torch.randn(4, 8, device=device))


@pytest.mark.parametrize("wrapped", [False, True])
def test_sync_batch_norm_gathers_statistics_and_adds_up_gradients(wrapped):
    seen = foresee(normalizes, 2, (wrapped,))
    kinds = [each.kind for each in seen.played.roles[0].program.trace.entries if type(each).__name__ == "Collective"]
    # DDP broadcasts the buffers first, and adds up the gradients of its bucket last.
    assert kinds[-3 if wrapped else -2 :][:2] == ["all_gather", "all_reduce"]
    assert len(kinds) == (5 if wrapped else 2)


def waits_for_values(rounds):
    x = torch.ones(2, device="cuda")
    while (x > 2).any():
        x = x * 2
        rounds -= 1
        if not rounds:
            break
    steps(nn.Linear(2, 2).cuda(), x)


def test_a_loop_that_goes_by_values_is_refused_at_its_line():
    assert foresee(waits_for_values, 1, (3,)).step_seconds > 0
    with pytest.raises(
        UnsupportedOp, match=r"a loop at .*test_idioms.py:\d+ goes on for 20,000 rounds.*number of rounds"
    ):
        foresee(waits_for_values, 1, (-1,))


def captures():
    assert torch.cuda.CUDAGraph | None  # as in annotations of libraries
    torch.cuda.CUDAGraph()


def test_cuda_graphs_are_refused_by_one_line():
    with pytest.raises(UnsupportedOp, match="CUDA graphs are not foreseen"):
        foresee(captures, 1)


def test_launches_of_the_host_are_no_contention():
    shares = foresee(prefetches, 1, gpu="h100").played.roles[0].shares
    assert shares.contention < 1e-9
    assert shares.idle > 0.3
    assert abs(sum(shares.kernels.values()) + sum(shares[1:]) - 1) < 1e-9


def adds_in_groups(backend):
    dist.init_process_group(backend)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.all_reduce(torch.ones(8, device="cuda"), group=dist.new_group([0, 1]))


@pytest.mark.parametrize("backend", [None, "cpu:gloo,cuda:nccl"])
def test_later_groups_have_the_backends_of_the_first(backend):
    assert not any("backend" in each for each in foresee(adds_in_groups, 2, (backend,)).assumptions)
