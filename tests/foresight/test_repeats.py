"""Microbatches that repeat an earlier one: their traces are those of a recording in which all of them run."""

import runpy
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.foresight.networks import cluster_of
from echelon.foresight.play.devices import device_named
from echelon.foresight.play.player import play
from echelon.foresight.record.log.repeats import Repeats
from echelon.foresight.record.run import record
from echelon.foresight.roles import digest
from tests.foresight import programs

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning", "ignore::UserWarning:torch")
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "foresee_llama.py")
MICROBATCHES = 8


@pytest.fixture
def repeated(monkeypatch):
    """Calls that did not run."""
    calls = []
    repeat = Repeats._repeat

    def counted(self, module, *args):
        calls.append(type(module).__name__)
        return repeat(self, module, *args)

    monkeypatch.setattr(Repeats, "_repeat", counted)
    return calls


def example(monkeypatch, *args):
    def main():
        runpy.run_path(EXAMPLE, run_name="__main__")

    monkeypatch.setattr(sys, "argv", [EXAMPLE, "--model", "tiny", "--microbatches", str(MICROBATCHES), *args])
    return main


def accumulated(*, change=None, criterion=nn.functional.mse_loss):
    """DDP with gradients that are accumulated over some microbatches."""
    device = programs.begin()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        for number in range(MICROBATCHES):
            if change is not None:
                change(model, number)
            x = torch.ones(4, 64, device=device)
            with nullcontext() if number == MICROBATCHES - 1 else model.no_sync():
                criterion(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()


def agree(program, world_size, ranks=(0,)):
    """Both recordings are equal, in each number."""
    full = record(program, world_size, ranks, full=True)
    fast = record(program, world_size, ranks)
    assert fast == full
    return full


def test_accumulated_gradients(repeated):
    agree(accumulated, 2)
    assert len(repeated) >= MICROBATCHES - 4, repeated
    assert set(repeated) == {"DistributedDataParallel"}


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_without_microbatches_that_repeat(use_orig_params):
    # Without the original parameters, torch refuses to say whether those of an earlier forward are leaves.
    program = partial(programs.fsdp1, use_orig_params=use_orig_params)
    full, fast = (record(program, 2, (0,), full=full)[0] for full in (True, False))
    assert digest(full) == digest(fast)


@pytest.mark.slow
def test_stages_of_a_pipeline_with_fsdp_and_tensor_parallelism(monkeypatch, repeated):
    program = example(monkeypatch, "--tp", "2", "--pp", "2")
    full = record(program, 8, full=True)  # the other stage is run for its messages
    assert not repeated
    fast = record(program, 8)
    assert len(repeated) >= MICROBATCHES
    assert len(fast) == 2
    assert fast == full
    assert [digest(each) for each in fast.values()] == [digest(each) for each in full.values()]
    device = device_named("h100")
    cluster = cluster_of("infiniband-400g", device, 8, 2)
    classes = [min(full) if rank < 4 else max(full) for rank in range(8)]
    timelines = [play(each, classes, device, cluster).timeline(kernels=True) for each in (full, fast)]
    assert timelines[0] == timelines[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ("--tp", "2"),
        ("--tp", "2", "--recompute"),
        ("--pp", "4"),
        ("--pp", "2", "--schedule", "GPipe"),
        ("--pp", "2", "--schedule", "Interleaved1F1B", "--recompute"),
        ("--pp", "2", "--schedule", "LoopedBFS"),
        ("--pp", "2", "--schedule", "ZBVZeroBubble"),
        ("--pp", "2", "--schedule", "DualPipeV"),
    ],
    ids=" ".join,
)
def test_programs_with_several_microbatches(monkeypatch, args):
    agree(example(monkeypatch, *args), 4, range(4))


def test_a_last_microbatch_that_does_something_else_is_recorded(repeated):
    """Nothing of the module tells: the difference is found when the last one runs, and then all of them run."""
    is_last = []

    class Changed(nn.Module):
        def forward(self, x):
            return x * x if is_last and is_last[-1] else x

    def program():
        device = programs.begin()
        model = nn.Sequential(nn.Linear(64, 64), Changed()).to(device)
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            for number in range(MICROBATCHES):
                is_last.append(number == MICROBATCHES - 1)
                model(torch.ones(4, 64, device=device)).sum().backward()
            optimizer.step()

    trace = agree(program, 1)[0]
    assert repeated
    products = [each for each in trace.entries if getattr(each, "name", "") == "mul" and each.phase == "forward"]
    assert len(products) == 1


@pytest.mark.parametrize("kind", ["flag", "hook", "counter", "list"])
def test_a_changed_module_is_recorded(kind, repeated):
    def change(model, number):
        layer = model.module[1]
        if kind == "flag":
            layer.approximate = "tanh" if number == 5 else "none"
        elif kind == "hook" and number == 5:
            layer.register_forward_hook(lambda _module, _args, out: out * 2)
        elif kind == "counter":
            layer.number = number
        elif kind == "list":
            layer.numbers = [*getattr(layer, "numbers", []), number]

    agree(lambda: accumulated(change=change), 2)
    assert bool(repeated) == (kind in ("flag", "hook"))


def test_a_loss_with_parameters_is_recorded():
    """Two modules in one backward pass."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x, y):
            return ((x - y) * self.scale).square().mean()

    def program():
        loss = Loss().to("cuda")
        accumulated(criterion=loss)

    agree(program, 2)
