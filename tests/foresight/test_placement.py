"""Tensors that a program leaves on the CPU are found, and take neither time nor memory of the GPU."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from echelon import foresee
from echelon.foresight.trace import HostKernel, Kernel
from tests.foresight import programs

WIDTH, BATCH = 64, 8
HERE = r"test_placement\.py:\d+"


class Net(nn.Module):
    """Has a parameter and a buffer that the program itself makes on the CPU."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x):
        return self.linear(x) * self.scale + self.shift


def replicated(device, net):
    return DistributedDataParallel(net.to(device), device_ids=[device.index])


def replicated_in_place(device, net):
    return DistributedDataParallel(net.to(device))  # without device_ids it leaves its inputs where they are


def moved(device, net):
    return net.to(device)


def numbered(device, net):
    index = device.index
    assert torch.ones(2, device=index).to(index).to(device=index).cuda(index).shape == (2,)
    return DistributedDataParallel(net.to(index).to(device=index), device_ids=[index])


def sharded(_, net):
    fully_shard(net, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    return net  # FSDP2 moves its parameters, buffers and inputs


def train(wrap, move_inputs, move_targets, after=None):
    device = programs.begin()
    model = wrap(device, Net())
    optimizer = torch.optim.SGD(model.parameters())
    data = TensorDataset(torch.randn(4 * BATCH, WIDTH), torch.randint(0, WIDTH, (4 * BATCH,)))
    for x, y in DataLoader(data, BATCH):
        x = x.to(device) if move_inputs else x
        y = y.cuda(non_blocking=True) if move_targets else y
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        if after is not None:
            after(loss)
        optimizer.step()
        optimizer.zero_grad()


def adds_on_the_host(loss):
    dist.all_reduce(torch.zeros(2))


def sends_from_the_host(loss):
    if dist.get_rank() == 0:
        dist.send(torch.zeros(2), 1)


def counts_on_the_host(loss):
    ones = torch.ones(3, dtype=torch.float64)
    (ones.to(torch.float32) + ones.to(dtype=torch.float32)).to(loss.device)
    (ones.to("cuda", torch.float32) + loss.detach()).to("cpu", torch.float64).numpy()
    total = torch.zeros(3)
    total += torch.ones(3) * loss.item()
    total[0] = loss
    (torch.stack([total, torch.rand(3)]).sum(0) + loss.detach().cpu()).tolist()


@pytest.mark.parametrize(
    ("wrap", "move_inputs"),
    [
        (replicated, False),
        pytest.param(replicated, True, marks=pytest.mark.slow),
        (replicated_in_place, True),
        (moved, True),
        (numbered, True),
        (sharded, False),
        pytest.param(sharded, True, marks=pytest.mark.slow),
    ],
)
def test_programs_that_move_their_tensors_run(wrap, move_inputs):
    assert foresee(train, 2, (wrap, move_inputs, True, counts_on_the_host)).step_seconds > 0


@pytest.mark.parametrize(
    ("wrap", "move_inputs", "move_targets", "name"),
    [
        (replicated, True, False, "nll_loss_forward"),
        (sharded, True, False, "nll_loss_forward"),
        (moved, False, True, "addmm"),
        (replicated_in_place, False, True, "addmm"),
    ],
)
def test_a_tensor_that_is_not_moved_is_found(wrap, move_inputs, move_targets, name):
    text = rf"{name} takes a tensor of the CPU, made at .*{HERE}, and one of the GPU: move the first one by .to"
    with pytest.raises(RuntimeError, match=text):
        foresee(train, 2, (wrap, move_inputs, move_targets, None))


def train_on_views(wrap, move_targets):
    device = programs.begin()
    model = wrap(device, nn.Sequential(nn.Embedding(WIDTH, WIDTH)))
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        batch = torch.randint(WIDTH, (BATCH, 33))
        x, y = batch[:, :-1], batch[:, 1:]
        y = y.to(device) if move_targets else y
        functional.cross_entropy(model(x).transpose(1, 2), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("wrap", [replicated, sharded])
def test_a_view_of_a_batch_stays_where_it_is_if_a_wrapper_moves_another_one(wrap):
    assert foresee(train_on_views, 2, (wrap, True)).step_seconds > 0
    with pytest.raises(RuntimeError, match=rf"takes a tensor of the CPU, made at .*{HERE}"):
        foresee(train_on_views, 2, (wrap, False))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        return self.linear(x) * mask


def train_on_keywords(wrap):
    device = programs.begin()
    model = wrap(device, Masked())
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        model(x=torch.ones(BATCH, WIDTH), mask=torch.ones(BATCH, 1)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("wrap", [replicated, sharded])
def test_wrappers_move_keywords_from_the_first_call_on(wrap):
    assert foresee(train_on_keywords, 2, (wrap,)).step_seconds > 0


def makes_tensors_like_others(loss):
    host, gpu = torch.ones(3), torch.ones(3, device="cuda")
    others = [torch.zeros_like(host, device="cuda"), torch.zeros_like(gpu, device=None), gpu.new_zeros(3, device=None)]
    others += [torch.normal(gpu, gpu), torch.zeros(3, out=torch.empty(3, device="cuda"))]
    with torch.device("cuda"):
        others.append(torch.ones(3))
    torch.set_default_device("cuda")
    others.append(torch.ones(3))
    torch.set_default_device(None)
    others.append(host.pin_memory().cuda(non_blocking=True))
    for each in others:
        assert (each * gpu * loss).shape == (3,)


def test_tensors_like_those_of_the_gpu_are_there():
    assert foresee(train, 2, (moved, True, True, makes_tensors_like_others)).step_seconds > 0


def uses_pinned_memory(loss):
    assert (torch.ones(3).pin_memory() * loss.reshape(1)).shape == (3,)


def test_pinned_memory_is_on_the_host():
    with pytest.raises(RuntimeError, match=rf"mul takes a tensor of the CPU, made at .*{HERE}"):
        foresee(train, 2, (moved, True, True, uses_pinned_memory))


def moves_one_of_two_views(loss):
    ids = torch.randint(0, WIDTH, (BATCH + 1,))
    inputs, targets = ids[:-1].cuda(), ids[1:]
    functional.cross_entropy(loss * functional.one_hot(inputs, WIDTH), targets)


def test_the_other_view_of_a_moved_tensor_stays_on_the_host():
    with pytest.raises(RuntimeError, match=rf"nll_loss_forward takes a tensor of the CPU, made at .*{HERE}"):
        foresee(train, 2, (moved, True, True, moves_one_of_two_views))


def distributes(loss):
    mesh = init_device_mesh("cuda", (2,))
    assert (distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).sum().full_tensor() * loss.detach()).shape == ()


def test_dtensor_moves_tensors_by_itself():
    assert foresee(train, 2, (moved, True, True, distributes)).step_seconds > 0


def widens_on_the_host(loss):
    (torch.ones(3, dtype=torch.float64).to(torch.float32) * loss).sum()


def test_a_tensor_of_another_dtype_stays_on_the_host():
    with pytest.raises(RuntimeError, match=rf"mul takes a tensor of the CPU, made at .*{HERE}"):
        foresee(train, 2, (moved, True, True, widens_on_the_host))


@pytest.mark.parametrize("after", [adds_on_the_host, sends_from_the_host])
def test_nccl_takes_no_tensor_of_the_cpu(after):
    with pytest.raises(RuntimeError, match=rf"nccl takes no tensor of the CPU, as the one made at .*{HERE}"):
        foresee(train, 2, (replicated, True, True, after))


def keeps(on_gpu):
    programs.begin()
    layer = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(layer.parameters())
    data = torch.zeros(1 << 28)
    if on_gpu:
        data = data.cuda()
    for _ in range(2):
        (data.view(-1, 8)[:4] + 1).cuda()
        layer(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()


def test_a_tensor_on_the_host_takes_no_memory_of_the_gpu():
    on_host, on_gpu = (foresee(keeps, 1, (each,)).live_memory[0] for each in (False, True))
    assert 1 << 30 <= on_gpu - on_host < (1 << 30) + 4096


OF_NO_FILE = """
import torch

def program():
    x = torch.randn(64, 64, device="cuda")
    y = x.cpu() * 2
    y.numpy()
    z = torch.ones(64, 64, pin_memory=True) + y
    z.numpy()
    if mixes:
        x + z
"""


@pytest.mark.parametrize("mixes", [False, True])
def test_results_of_the_host_stay_there_where_no_line_is_known(mixes):
    names = {"mixes": mixes}
    exec(OF_NO_FILE, names)  # its file is "<string>", which is none of the program
    if not mixes:
        entries = foresee(names["program"], 1).traces[0].entries
        assert [each.name for each in entries if isinstance(each, HostKernel)] == ["mul", "add"]
        return
    with pytest.raises(RuntimeError, match="a tensor of the CPU, made at an unknown line, and one of the GPU"):
        foresee(names["program"], 1)


def linears():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH))


def trains_on_host(has_gpu):
    others = [torch.ones(1, device="cuda")] * has_gpu  # noqa: F841
    model = linears()
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        model(torch.ones(BATCH, WIDTH)).sum().backward()
        optimizer.step()


def test_a_module_that_is_called_with_tensors_of_the_host_computes_there():
    seen = foresee(trains_on_host, 1, (True,))
    assert {type(each) for each in seen.traces[0].entries if hasattr(each, "phase")} == {HostKernel}
    assert seen.host_memory[0] >= 4 * 4 * WIDTH * WIDTH


def test_a_program_without_tensors_of_the_gpu_computes_there_all_the_same():
    seen = foresee(trains_on_host, 1, (False,))
    entries = [each for each in seen.traces[0].entries if getattr(each, "name", "") in ("mm", "native_batch_norm")]
    assert {type(each) for each in entries} == {Kernel}


def trains_both(is_foreach):
    table, model = nn.Embedding(1000, WIDTH), linears().cuda()
    parameters = [*table.parameters(), *model.parameters()]
    optimizer = torch.optim.SGD(parameters, foreach=is_foreach)
    while True:
        model(table(torch.arange(BATCH)).cuda()).sum().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


@pytest.mark.parametrize("is_foreach", [None, True])
def test_one_optimizer_updates_parameters_of_both(is_foreach):
    entries = foresee(trains_both, 1, (is_foreach,)).traces[0].entries
    updates = [each for each in entries if getattr(each, "phase", "") == "optimizer"]
    # As torch: many at once by default only if all of them are on a GPU.
    assert [(type(each), each.name, each.launches) for each in updates if "add" in each.name] == (
        [(HostKernel, "_foreach_add_", 1), (Kernel, "_foreach_add_", 1)]
        if is_foreach
        else [(HostKernel, "add_", 1), *[(Kernel, "add_", 1)] * 3]
    )


def calls_with_fast_weights():
    model = linears().cuda()
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        weights = {name: 2 * each for name, each in model.named_parameters()}
        torch.func.functional_call(model, weights, (torch.ones(BATCH, WIDTH, device="cuda"),)).sum().backward()
        optimizer.step()


def test_tensors_in_the_place_of_parameters_are_none():
    kinds = foresee(calls_with_fast_weights, 1, steps=1).memory[0].kinds_at_peak
    # The weights of the normalisation are below the 512 bytes of a block.
    assert kinds["parameters"] == 4 * WIDTH * WIDTH + 2 * 512
