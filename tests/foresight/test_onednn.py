"""LSTMs and convolutions in a forecast: the memory of a real run, and the FLOPs of an LSTM's products."""

import platform
from functools import partial

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import echelon
from echelon.foresight.record.kernels.onednn import LSTM_LAYERS
from echelon.foresight.trace import Kernel

WIDTH, HIDDEN = 48, 64

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available(), reason="the sizes are those of x86-64"
)


def lstm(sequences, steps, device="cpu", **options):
    model = nn.LSTM(WIDTH, HIDDEN, batch_first=True, **options).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(sequences, steps, WIDTH, device=device))[0].pow(2).mean().backward()
        optimizer.step()


class Network(nn.Module):
    """Convolutions with groups, dilation and strides, there and back, whose gradients are parts of others."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.grouped = nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=4, bias=False)
        self.down = nn.Conv2d(32, 64, 3, padding=1, stride=2)
        self.up = nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.last = nn.Conv2d(64, 3, 1)

    def forward(self, images):
        wide = self.grouped(nn.functional.silu(self.first(images)))
        return self.last(torch.cat([wide, self.up(nn.functional.silu(self.down(wide)))], 1))


def convolutions(memory_format):
    model = Network().to(memory_format=memory_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 48, 48).to(memory_format=memory_format)).square().mean().backward()
        optimizer.step()


def deep():
    """Convolutions of small images, whose weights are larger than they, and of images with few channels."""
    model = nn.Sequential(
        nn.Conv2d(3, 128, 7, padding=3),
        nn.Conv2d(128, 250, 3, stride=2, padding=1),
        nn.Conv2d(250, 256, 3, padding=1),
        nn.Conv2d(256, 128, 1, stride=2),
    )
    for _ in range(2):
        model(torch.randn(2, 3, 16, 16)).square().mean().backward()


def transposed():
    """The gradient that a LayerNorm gives a transposed input is contiguous, so that the convolution copies it."""
    convolution, norm = nn.Conv1d(96, 96, 3, padding=1), nn.LayerNorm(96)
    for _ in range(2):
        norm(convolution(torch.randn(8, 96, 400)).transpose(1, 2)).square().mean().backward()


def sequences():
    """Convolutions over words, whose channels are last in other layers."""
    model = nn.Conv1d(64, 96, 5)
    for _ in range(3):
        model(torch.randn(16, 300, 64, requires_grad=True).transpose(1, 2)).transpose(1, 2).square().mean().backward()


def real_peak(program):
    """Returns the most bytes that torch's allocator has given out at once. Like a rank it has one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            program()
    finally:
        torch.set_num_threads(threads)
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
    program = partial(lstm, sequences, steps, "cpu", **options)
    seen, _ = foreseen(program, "cpu")
    assert seen.live_memory[0] == pytest.approx(real_peak(program), rel=0.02)


@pytest.mark.parametrize(
    "program",
    [
        partial(convolutions, torch.contiguous_format),
        partial(convolutions, torch.channels_last),
        sequences,
        deep,
        transposed,
    ],
    ids=["contiguous", "channels last", "words", "deep", "transposed"],
)
def test_convolutions_have_the_memory_of_a_real_run(program):
    seen, _ = foreseen(program, "cpu")
    assert seen.live_memory[0] == pytest.approx(real_peak(program), rel=0.02)


def test_its_products_are_counted():
    seen, found = foreseen(partial(lstm, 8, 20, num_layers=2), "cpu")
    forward = 2 * 20 * 8 * 4 * HIDDEN * (WIDTH + HIDDEN + 2 * HIDDEN)
    assert sum(each.flops for each in found) == 3 * forward
    assert [each.kind for each in found] == ["matmul"] * 4
    assert not seen.assumptions
