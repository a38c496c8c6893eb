"""Microbatches that repeat an earlier one: their traces are those of a recording in which all of them run."""

import random
import runpy
import sys
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import echelon
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


def accumulated(*, change=None, criterion=nn.functional.mse_loss, wrap=DistributedDataParallel):
    """DDP with gradients that are accumulated over some microbatches."""
    device = programs.begin()
    model = wrap(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(device))
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


def do_the_same(program):
    """Both recordings are equal, except for the numbers of their lines."""
    full, fast = (record(program, 1, full=full)[0] for full in (True, False))
    assert digest(fast) == digest(full)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, echelon.DDP])
def test_accumulated_gradients(repeated, wrap):
    agree(partial(accumulated, wrap=wrap), 2)
    assert len(repeated) >= MICROBATCHES - 4, repeated
    assert set(repeated) == {wrap.__name__}


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
    now = SimpleNamespace(is_last=False)

    class Changed(nn.Module):
        def forward(self, x):
            return x * x if now.is_last else x

    def program():
        device = programs.begin()
        model = nn.Sequential(nn.Linear(64, 64), Changed()).to(device)
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            for number in range(MICROBATCHES):
                now.is_last = number == MICROBATCHES - 1
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


class Counted(nn.Module):
    """Layer that computes more in each of its calls whose number is odd, by different ways to count."""

    def __init__(self, is_odd):
        super().__init__()
        self.layer, self.is_odd, self.numbers, self.state = nn.Linear(64, 64), is_odd, [0], SimpleNamespace(number=0)

    def forward(self, x):
        return self.layer(x).sin() if self.is_odd(self) else self.layer(x)


def in_list(layer):
    layer.numbers[0] += 1
    return layer.numbers[0] % MICROBATCHES == 4


def in_object(layer):
    layer.state.number += 1
    return layer.state.number % MICROBATCHES == 4


def drawn(_):
    return random.random() < 0.5


def in_closure():
    number = 0

    def is_odd(_):
        nonlocal number
        number += 1
        return number % MICROBATCHES == 4

    return is_odd


def microbatches(layer, *, around=lambda _, __: nullcontext(), inputs=lambda _: ()):
    layer = layer.to("cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    while True:
        for number in range(MICROBATCHES):
            given = torch.ones(8, 64, device="cuda"), *inputs(number)
            with around(layer, number == 3):
                layer(*given).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("ways", [lambda: in_list, lambda: in_object, in_closure, lambda: drawn])
def test_calls_that_a_module_counts_or_draws_are_recorded(ways, repeated):
    def program():
        random.seed(4)
        microbatches(Counted(ways()))

    do_the_same(program)
    assert not repeated


def with_hook(layer, is_odd):
    if not is_odd:
        return nullcontext()
    stack = ExitStack()
    stack.callback(layer.weight.register_hook(lambda gradient: gradient * 2).remove)
    return stack


def with_precision(_, is_odd):
    torch.set_float32_matmul_precision("high" if is_odd else "highest")
    return nullcontext()


def with_function(layer, is_odd):
    layer.forward = (
        partial(nn.functional.linear, weight=layer.weight) if is_odd else partial(type(layer).forward, layer)
    )
    return nullcontext()


@pytest.mark.parametrize(
    "around",
    [
        lambda _, is_odd: torch.autograd.graph.save_on_cpu() if is_odd else nullcontext(),
        with_hook,
        with_precision,
        with_function,
    ],
)
def test_a_microbatch_in_other_surroundings_is_recorded(around):
    do_the_same(lambda: microbatches(nn.Linear(64, 64), around=around))


class Cut(nn.Linear):
    def forward(self, x, lengths):
        return super().forward(x[: int(lengths.max())])


def test_microbatches_with_other_known_values_are_recorded(repeated):
    lengths = lambda number: (torch.tensor([1, 2, 5 if number == 3 else 3]),)  # noqa: E731
    do_the_same(lambda: microbatches(Cut(64, 64), inputs=lengths))
    assert repeated


def test_known_values_of_a_result_are_recorded():
    class Values(nn.Linear):
        def forward(self, x, lengths):
            return super().forward(x), lengths + 1

    def program():
        layer = Values(64, 64).to("cuda")
        optimizer = torch.optim.SGD(layer.parameters())
        while True:
            for _ in range(MICROBATCHES):
                out, lengths = layer(torch.ones(8, 64, device="cuda"), torch.tensor([1, 4]))
                out[: int(lengths.max())].sum().backward()
            optimizer.step()

    do_the_same(program)


def test_a_microbatch_on_the_host_is_recorded():
    class Moves(nn.Linear):
        def forward(self, x, batch):
            return super().forward(x + batch.to("cuda"))

    inputs = lambda number: (torch.ones(8, 64, device="cpu" if number == 3 else "cuda"),)  # noqa: E731
    do_the_same(lambda: microbatches(Moves(64, 64), inputs=inputs))


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
