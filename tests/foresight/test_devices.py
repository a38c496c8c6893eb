"""Programs and libraries find tensors, modules and meshes on the devices where a GPU would have them."""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from echelon import foresee
from echelon.foresight.record.run import record
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
    host = [torch.ones(3), torch.ones(3) + 1, torch.from_numpy(np.ones(3)), torch.tensor([1.0]), torch.tensor(1)]
    assert {(each.device.type, each.is_cuda, each.get_device(), each.type()[:10]) for each in host[:4]} == {
        ("cpu", False, -1, "torch.Floa"),
        ("cpu", False, -1, "torch.Doub"),
    }
    assert torch.ones(3).type(torch.cuda.HalfTensor).device == device
    moved = [x.cpu(), x.to("cpu"), x.to(host[0]), x.type(torch.FloatTensor), x.type("torch.HalfTensor"), x.to(x.cpu())]
    assert {each.device.type for each in moved} == {"cpu"}
    assert x.device == device
    empty = [x.to("meta"), torch.empty(3, device="meta"), nn.Linear(2, 2, device="meta").weight]
    assert {(each.device.type, each.is_cuda) for each in empty} == {("meta", False)}


def of_modules(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    assert {each.device for each in model.state_dict().values()} == {device}
    loss = model(torch.ones(4, 4, device=device)).sum()
    loss.backward()
    assert loss.device == next(model.parameters()).grad.device == device
    assert nn.MultiheadAttention(4, 2, device=device)(*[torch.ones(4, 4, device=device)] * 3)[0].is_cuda
    assert checkpoint(model, torch.ones(4, 4, device=loss.device), use_reentrant=False).device == device


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
    assert torch.rand(3, generator=torch.Generator(device), device=device).is_cuda
    assert torch.ones(1).device.type == "cpu"


def of_autocast(device):
    x = torch.ones(4, 4, device=device)
    assert torch.get_autocast_dtype("cuda") == torch.float16
    for autocast in (torch.autocast("cuda", torch.bfloat16), torch.autocast(x.device.type, torch.bfloat16)):
        with autocast:
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == (x @ x).dtype == torch.bfloat16
            with torch.autocast("cuda", enabled=False):
                assert not torch.is_autocast_enabled("cuda")
                assert (x @ x).dtype == torch.float32
            assert (x @ x).dtype == torch.bfloat16
        assert not torch.is_autocast_enabled("cuda")


class Product(torch.autograd.Function):
    """Notes the type of its products, by autocast as torch's own documentation has it."""

    found: list[torch.dtype]

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(_, x):
        Product.found.append((x @ x).dtype)
        return x @ x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(_, gradient):
        Product.found.append((torch.ones(4, 4, device=gradient.device) @ gradient.float()).dtype)
        return gradient


def of_own_functions(device):
    Product.found = []
    x = torch.ones(4, 4, device=device, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        out = Product.apply(x)
    out.sum().backward()
    assert Product.found == [torch.bfloat16] * 2


def of_parallelism(device):
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
    assert mesh.device_type == mesh["dp"].device_type == "cuda"
    split = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    assert {each.device for each in (split, split.to_local(), split.full_tensor(), split * 2)} == {device}
    assert (split.is_cuda, split.is_cpu) == (True, False)
    sharded = nn.Linear(8, 8)
    fully_shard(sharded, mesh=mesh)
    assert next(sharded.parameters()).device == sharded(torch.ones(2, 8)).device == device
    ddp = DistributedDataParallel(nn.Linear(8, 8).to(device), device_ids=[device.index])
    assert ddp.device == ddp(torch.ones(2, 8)).device == device
    x = torch.ones(4, device=device)
    gathered = torch.empty(4 * dist.get_world_size(), device=device)
    dist.all_gather_single(gathered, x)
    assert gathered.device == device


def of_optimizers(device):
    model = nn.Linear(8, 8).to(device)
    model(torch.ones(2, 8, device=device)).sum().backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).device == device
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["exp_avg"].device == device
    assert torch.amp.GradScaler("cuda").scale(torch.ones(1, device=device)).device == device
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    assert next(average.parameters()).device == device


def of_loaders(device):
    for (x,) in DataLoader(TensorDataset(torch.ones(8, 4)), 2, pin_memory=True):
        assert x.device.type == "cpu"
        assert x.to(device, non_blocking=True).device == device


@pytest.mark.parametrize(
    "check",
    [
        of_tensors,
        of_modules,
        of_defaults,
        of_autocast,
        of_own_functions,
        of_parallelism,
        of_optimizers,
        of_loaders,
    ],
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


def test_a_program_without_gpus_finds_tensors_on_the_cpu():
    found = []

    def program():
        model = nn.Linear(4, 4)
        found.extend(each.device.type for each in (model.weight, model(torch.ones(2, 4)), torch.ones(2)))

    record(program, 1)
    assert found == ["cpu"] * 3
