"""This machine as a device: kernels timed by kind and size, and communication. Takes about a minute."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from echelon.cores import num_cores
from echelon.foresight.calibrate_links import links
from echelon.foresight.play.device import Curve, Device
from echelon.foresight.record.here import recording_here
from echelon.foresight.record.run import record
from echelon.foresight.trace import Kernel

_SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)
"""Elements of the tensors of kernels that are bound by memory."""
_SIDES = (1, 8, 32, 128, 512, 1024)
"""Lengths of one side of a matrix product, whose other sides are 512."""
_LENGTHS = (64, 256, 1024)
"""Lengths of sequences in attention."""
_NEAR = 32 << 20
"""Total bytes of the copies that take turns: more than a core's caches hold, as in a training step."""
_SECONDS = 0.03
"""Time in which a kernel is called again and again."""

Act = Callable[[], object]


def calibrate() -> Device:
    """Measures this machine with one thread, and returns it as a device whose ranks share its processors.

    The machine should do nothing else meanwhile.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            curves = {name: tuple(sorted(points)) for name, points in _curves().items()}
    finally:
        torch.set_num_threads(num_threads)
    # The curves of products are seconds for a FLOP.
    peak = 1 / min(seconds for name in ("matmul_m", "matmul_n", "matmul_k") for _, seconds in curves[name])
    size, seconds = curves["copy_"][-1]
    measured_links = links(num_cores())
    device = Device(
        name="cpu",
        peak=MappingProxyType(dict.fromkeys(("float32", "bfloat16", "float16", "float64"), peak)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        memory_bandwidth=size / seconds,
        num_sms=1,
        per_host=1024,  # by default all ranks of a job are on this host
        local_bandwidth=1e9,  # not used: without NCCL that of the network counts
        matmul_share=1.0,
        attention_share=1.0,
        memory_share=1.0,
        tile_seconds=0.0,
        kernel_seconds=0.0,
        launch_seconds=0.0,
        communication_sms=0,
        is_synchronous=True,
        machine=this_machine(),
        cores=num_cores(),
        curves=MappingProxyType(curves),
        networks=MappingProxyType({name: line(curves) for name, curves in measured_links.items()}),
        links=MappingProxyType(measured_links),
    )
    return replace(device, launch_seconds=_launch_seconds(device))


def this_machine() -> str:
    """Returns the kind of this machine: the number and model of its processors, and the version of torch."""
    # Where /proc/cpuinfo names no model, as on ARM.
    model = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        model = next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    return f"{num_cores()} x {model}, torch {torch.__version__}"


# Kernels


def _acts(elements: int) -> list[Act]:
    """Returns calls of one kernel each, on tensors of about `elements` elements, as in a training step."""
    aten = torch.ops.aten
    x, y, z = (torch.randn(max(1, elements // 256), min(elements, 256)) for _ in range(3))
    weight, bias = torch.ones(x.shape[1]), torch.zeros(x.shape[1])
    mean, rstd = torch.zeros(x.shape[0], 1), torch.ones(x.shape[0], 1)
    positive = torch.ones_like(x)
    table, words = torch.randn_like(x), torch.arange(x.shape[0])
    flags = torch.ones_like(x, dtype=torch.bool)
    return [
        lambda: aten.add(x, y),
        lambda: aten.mul(x, y),
        lambda: aten.div(x, positive),
        lambda: aten.add_(x, y),
        lambda: aten.mul_(x, 1.0),
        lambda: aten.copy_(x, y),
        lambda: aten.clone(x),
        lambda: aten.zero_(z),
        lambda: aten.sum(x, [0]),
        lambda: aten.mean(x),
        lambda: aten.pow(x, 2),
        lambda: aten.sqrt(positive),
        lambda: aten.lerp_(x, y, 0.1),
        lambda: aten.addcmul_(x, y, z, value=0.1),
        lambda: aten.addcdiv_(x, y, positive, value=0.1),
        lambda: aten.relu(x),
        lambda: aten.threshold_backward(x, y, 0),
        lambda: aten.gelu(x),
        lambda: aten.gelu_backward(x, y),
        lambda: aten.silu(x),
        lambda: aten.silu_backward(x, y),
        lambda: aten.tanh(x),
        lambda: aten.tanh_backward(x, y),
        lambda: aten.exp(z),
        lambda: aten.where(flags, x, y),
        lambda: aten.native_layer_norm(x, [x.shape[1]], weight, bias, 1e-5),
        lambda: aten.native_layer_norm_backward(x, y, [x.shape[1]], mean, rstd, weight, bias, [True, True, True]),
        lambda: aten._softmax(x, -1, False),
        lambda: aten._softmax_backward_data(x, y, -1, torch.float32),
        lambda: aten._log_softmax(x, -1, False),
        lambda: aten._log_softmax_backward_data(x, y, -1, torch.float32),
        lambda: aten.embedding(table, words),
        lambda: aten.embedding_dense_backward(x, words, len(table), -1, False),
        lambda: aten.cat([x, y]),
        lambda: aten.bernoulli_(z, 0.5),
        lambda: aten._to_copy(x, dtype=torch.bfloat16),
    ]


def _products(side: int) -> dict[str, Act]:
    """Returns matrix products with one side of this length, by the name of their curve."""
    wide, other = torch.randn(512, 512), torch.randn(512, 512)
    left, right = torch.randn(side, 512), torch.randn(512, side)
    return {
        "matmul_m": lambda: torch.mm(left, wide),
        "matmul_n": lambda: torch.mm(other, right),
        "matmul_k": lambda: torch.mm(right, left),
    }


def _attentions(length: int) -> dict[str, Act]:
    """Returns attention over sequences of this length, by the name of its curve."""
    q, k, v, g = (torch.randn(2, 8, length, 64) for _ in range(4))
    aten = torch.ops.aten
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return {
        "attention": lambda: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v),
        "attention_backward": lambda: backward(g, q, k, v, out, sums, 0.0, False),
    }


def _attention_acts(length: int) -> list[Act]:
    return list(_attentions(length).values())


def _curves() -> dict[str, list[tuple[float, float]]]:
    curves: dict[str, list[tuple[float, float]]] = {}
    for elements in _SIZES:
        # A call touches about three tensors of float32: 12 bytes for each element.
        copies = [_acts(elements) for _ in range(max(1, min(64, _NEAR // (12 * elements))))]
        for number, kernel in enumerate(_recorded(partial(_acts, elements))):
            seconds = _seconds([acts[number] for acts in copies])
            curves.setdefault(kernel.name, []).append((kernel.num_bytes, seconds))
    for side in _SIDES:
        for name, act in _products(side).items():
            curves.setdefault(name, []).append((side, _seconds([act]) / (2 * 512 * 512 * side)))
    for length in _LENGTHS:
        recorded = _recorded(partial(_attention_acts, length))
        for (name, act), kernel in zip(_attentions(length).items(), recorded, strict=True):
            curves.setdefault(name, []).append((kernel.flops, _seconds([act])))
    return curves


def _recorded(make: Callable[[], list[Act]]) -> list[Kernel]:
    """Returns the kernel of each call, as the recorder sees it."""
    found: list[Kernel] = []

    def main() -> None:
        recording = recording_here()
        assert recording is not None
        with torch.no_grad():
            for act in make():
                before = len(recording.log.entries)
                act()
                (kernel,) = (each for each in recording.log.entries[before:] if isinstance(each, Kernel))
                found.append(kernel)

    record(main, 1, gpu=None)
    return found


def _seconds(acts: list[Act]) -> float:
    """Returns the median time of a call. The calls take turns, each with tensors of its own."""
    for act in acts:  # the first calls map memory, and oneDNN makes its kernels
        act()
    turns: list[float] = []
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(turns) < 3:
        begin = time.perf_counter()
        for act in acts:
            act()
        turns.append((time.perf_counter() - begin) / len(acts))
    return statistics.median(turns)


def _launch_seconds(device: Device) -> float:
    """Returns the time that Python and autograd take for a kernel, from a training step of a tiny model."""

    def step_of_model() -> Callable[[Tensor], None]:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(16)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(batch: Tensor) -> None:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def main() -> None:
        step = step_of_model()
        for _ in range(2):
            step(torch.randn(8, 8))

    kernels = [each for each in record(main, 1, gpu=None)[0].entries if isinstance(each, Kernel)]
    computing = sum(device.seconds(each) for each in kernels)
    whole = _seconds([partial(step_of_model(), torch.randn(8, 8))])
    # Kernels of this model are smaller than the smallest that was measured, and may be faster.
    return max(0.0, whole - computing) / sum(each.launches for each in kernels)


# Communication


def line(curves: Mapping[str, Curve]) -> tuple[float, float]:
    """Returns the latency in seconds, and the bytes per second, of an all_reduce of two ranks."""
    (_, latency), *_, (size, seconds) = curves["all_reduce 2"]
    latency = min(latency, seconds / 2)  # a busy machine may have taken longer for few bytes than for many
    return latency, size / (seconds - latency)
