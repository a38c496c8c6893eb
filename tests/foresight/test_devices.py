"""Tensors, modules and libraries find the devices that they would find on a GPU."""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from echelon import foresee
from echelon.foresight.record.run import record
from echelon.foresight.trace import Allocate
from tests.foresight import programs


def of_tensors(device):
    x = torch.ones(4, 4, device=device)
    assert (x.is_cuda, x.is_cpu, x.get_device(), x.device.index) == (True, False, device.index, device.index)
    assert x.type() == "torch.cuda.FloatTensor"
    views = [x[0], x.t(), x.detach(), x.data, x.view(-1), x.split(2)[0]]
    results = [x + x, x @ x, torch.zeros_like(x), x.new_zeros(3), torch.where(x > 0, x, 0.0), torch.stack([x, x])]
    moved = [torch.ones(3).cuda(), torch.ones(3).to(x), torch.from_numpy(np.ones(3)).to(device), x.to("cuda")]
    made = [torch.tensor([1.0], device=device), torch.as_tensor([1.0], device=device), torch.randperm(4, device=device)]
    made += [torch.zeros(3, device=x.device), torch.arange(3, device=device.index)]
    made += [x.nonzero(), torch.func.grad(torch.sum)(x), torch.vmap(torch.sum)(x)]
    assert {each.device for each in (*views, *results, *moved, *made)} == {device}
    host = [torch.ones(3), x.cpu(), x.to("cpu", torch.float16), torch.zeros_like(x, device="cpu"), x.cpu() + 1]
    host += [x.type(torch.FloatTensor), torch.from_numpy(np.ones(3)), torch.tensor([1])]
    assert not any(each.is_cuda for each in host)
    assert x.is_cuda  # not moved by `cpu`
    assert torch.ones(3).type(torch.cuda.HalfTensor).device == device


def of_modules(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert {each.device.type for each in model.state_dict().values()} == {"cpu"}
    model.to(device)
    assert {each.device for each in model.state_dict().values()} == {device}
    loss = model(torch.ones(4, 4, device=device)).sum()
    loss.backward()
    assert loss.device == next(model.parameters()).grad.device == device
    assert {each.cpu().device.type for each in model.state_dict().values()} == {"cpu"}
    assert next(model.cpu().parameters()).device.type == "cpu"
    assert nn.MultiheadAttention(4, 2, device=device)(*[torch.ones(4, 4, device=device)] * 3)[0].is_cuda


def of_defaults(device):
    assert torch.get_default_device() == torch.device("cpu")
    with torch.device("cuda"):
        made = [torch.ones(3), torch.tensor(3.0), nn.Linear(2, 2).weight, torch.empty(2)]
        assert torch.get_default_device() == device
    torch.set_default_device(device)
    made.append(torch.rand(3))
    torch.set_default_device(None)
    assert {each.device for each in made} == {device}
    assert torch.Generator(device).device == torch.cuda.current_stream().device == device
    assert torch.ones(1).device.type == "cpu"


def of_autocast(device):
    x = torch.ones(4, 4, device=device)
    for autocast in (torch.autocast("cuda", torch.bfloat16), torch.autocast(x.device.type, torch.bfloat16)):
        assert autocast.device == "cuda"
        with autocast:
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == (x @ x).dtype == torch.bfloat16
            assert (x @ x).softmax(-1).dtype == torch.float32
            with torch.autocast("cuda", enabled=False):
                assert (x @ x).dtype == torch.float32
            assert (x @ x).dtype == torch.bfloat16
        assert not torch.is_autocast_enabled("cuda")
        assert (x @ x).dtype == torch.float32


def of_parallelism(device):
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
    assert mesh.device_type == mesh["dp"].device_type == "cuda"
    split = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    assert {each.device for each in (split, split.to_local(), split.full_tensor(), split * 2)} == {device}
    assert split.is_cuda
    assert not split.is_cpu
    sharded = nn.Linear(8, 8)
    fully_shard(sharded, mesh=mesh)
    assert next(sharded.parameters()).device == sharded(torch.ones(2, 8)).device == device
    ddp = DistributedDataParallel(nn.Linear(8, 8).to(device), device_ids=[device.index])
    assert (ddp.device, ddp.device_ids, ddp.device_type) == (device, [device.index], "cuda")
    assert ddp(torch.ones(2, 8)).device == device
    x = torch.ones(4, device=device)
    gathered = torch.empty(4 * dist.get_world_size(), device=device)
    dist.all_gather_into_tensor(gathered, x)
    received = [gathered, functional.all_reduce(x, "sum", mesh), functional.all_gather_tensor(x, 0, mesh)]
    assert {each.device for each in received} == {device}
    peer = 1 - dist.get_rank()
    batch = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.empty_like(x), peer)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, device.type)
    assert objects == ["cuda"] * dist.get_world_size()


def of_optimizers(device):
    model = nn.Linear(8, 8).to(device)
    model(torch.ones(2, 8, device=device)).sum().backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).device == device
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    state = optimizer.state_dict()["state"][0]
    assert (state["exp_avg"].device, state["step"].device.type) == (device, "cpu")
    assert torch.amp.GradScaler("cuda").scale(torch.ones(1, device=device)).device == device
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    assert next(average.parameters()).device == device


def of_loaders(device):
    for (x,) in DataLoader(TensorDataset(torch.ones(8, 4)), 2, pin_memory=True):
        assert x.device.type == "cpu"
        assert x.to(device, non_blocking=True).device == device
    state = torch.Generator().manual_seed(3).get_state()
    generator = torch.Generator()
    generator.set_state(state.to(device).cpu())  # known values, as torch's libraries send them to other ranks
    assert torch.equal(generator.get_state(), state)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "check", [of_tensors, of_modules, of_defaults, of_autocast, of_parallelism, of_optimizers, of_loaders]
)
def test_devices_are_those_of_a_gpu(check):
    ran = []

    def program():
        device = programs.begin()
        check(device)
        ran.append(device.index)

    record(program, 2, [0, 1])
    assert ran == [0, 1]


def trains_on_its_device():
    dist.init_process_group("nccl")
    init_device_mesh("cuda", (dist.get_world_size(),))  # makes the GPU of LOCAL_RANK current
    model = nn.Linear(64, 64).cuda()
    assert torch.cuda.is_initialized()
    assert next(model.parameters()).device.index == int(os.environ["LOCAL_RANK"])
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        x = torch.ones(8, 64, device=next(model.parameters()).device)
        # As programs choose kernels of their own for a GPU.
        (model(x) if x.is_cuda else model(model(x))).sum().backward()
        optimizer.step()


def test_a_program_takes_the_way_of_a_gpu():
    seen = foresee(trains_on_its_device, 2)
    assert not seen.assumptions
    trace = seen.played.roles[0].program.trace
    assert sum(each.name == "addmm" for each in trace.entries if hasattr(each, "flops")) == 1


def test_a_functional_collective_has_one_result():
    def program():
        device = programs.begin()
        functional.all_reduce(torch.ones(1 << 20, device=device), "sum", dist.group.WORLD) + 1

    sizes = [each.num_bytes for each in record(program, 2)[0].entries if isinstance(each, Allocate)]
    assert [each for each in sizes if each >= 4 << 20] == [4 << 20] * 3
