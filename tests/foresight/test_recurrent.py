"""LSTMs in a forecast: the memory of a real run, and the FLOPs of their products."""

import functools

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import echelon
from echelon.foresight.record.recurrent import LSTM_LAYERS
from echelon.foresight.trace import Allocate, Kernel

WIDTH, HIDDEN = 48, 64

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def step(sequences, steps, device="cpu", **options):
    model = nn.LSTM(WIDTH, HIDDEN, batch_first=True, **options).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(sequences, steps, WIDTH, device=device))[0].pow(2).mean().backward()
        optimizer.step()


def real_peak(program):
    """Returns the most bytes that torch's allocator has given out at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        program()
    live = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def foreseen(program, gpu):
    seen = echelon.foresee(program, 1, gpu=gpu)
    ((_, trace),) = seen.traces.items()
    return seen, [each for each in trace.entries if isinstance(each, Kernel) and each.name in LSTM_LAYERS]


@pytest.mark.parametrize(
    ("sequences", "steps", "options"),
    [(32, 100, {"num_layers": 2}), (16, 200, {}), (24, 60, {"bidirectional": True})],
)
def test_it_has_the_memory_of_a_real_run(sequences, steps, options):
    program = functools.partial(step, sequences, steps, "cpu", **options)
    seen, _ = foreseen(program, "cpu")
    assert seen.live_memory[0] == pytest.approx(real_peak(program), rel=0.02)


@pytest.mark.parametrize("gpu", ["cpu", "h100"])
def test_its_products_are_counted(gpu):
    program = functools.partial(step, 8, 20, "cpu" if gpu == "cpu" else "cuda", num_layers=2)
    seen, found = foreseen(program, gpu)
    forward = 2 * 20 * 8 * 4 * HIDDEN * (WIDTH + HIDDEN + 2 * HIDDEN)
    assert sum(each.flops for each in found) == 3 * forward
    assert [each.kind for each in found] == ["matmul"] * 4
    assert bool(seen.assumptions) == (gpu != "cpu")


def test_a_gpu_keeps_six_values_for_each_unit():
    seen, _ = foreseen(functools.partial(step, 8, 20, "cuda"), "h100")
    ((_, trace),) = seen.traces.items()
    sizes = [each.num_bytes for each in trace.entries if isinstance(each, Allocate)]
    assert sizes.count(6 * 8 * 20 * HIDDEN * 4) == 1
