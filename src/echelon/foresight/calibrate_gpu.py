"""This machine's GPU as a device: the model's constants from ten kernels and a collective, timed in half a minute.

Matrix products and attention in bfloat16 give their shares of the peak. A copy gives the bandwidth of memory. Small
kernels give the cost of a kernel and of its launch. With several GPUs, an all-gather gives the bandwidth between them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from echelon.foresight.play.device import Device, attention_seconds, matmul_seconds
from echelon.foresight.play.devices import DEVICES
from echelon.foresight.trace import TF32
from echelon.launch.spawn import spawn

PRODUCTS = ((4096, 4096, 4096), (8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (1024, 8192, 8192))
"""(m, n, k) of matrix products, as in the layers of transformers."""
ATTENTIONS = (1024, 2048, 4096, 8192)
"""Lengths of causal sequences, with 16 heads of 128."""
_HEADS, _HEAD = 16, 128
_COPIED = 1 << 29
"""Bytes of the tensor that is copied: far more than the caches."""
_GATHERED = 1 << 28
"""Bytes that an all-gather returns on each rank."""
_REPEATS = 20
"""Calls of a kernel, of whose times the median counts."""
_IN_GRAPH = 200
"""Small kernels of a graph, by which its launch takes no time for each of them."""
# The longer of two names comes first, since it contains the shorter one.
_MARKS = (
    ("NVIDIA B200", "b200"),
    ("H200", "h200"),
    ("H100", "h100"),
    ("A100-SXM4-40GB", "a100-40g"),
    ("A100", "a100"),
)
"""Parts of the names that CUDA gives to GPUs of the table."""


class Facts(NamedTuple):
    """Facts about a GPU, as CUDA reports them."""

    name: str
    memory_bytes: int
    num_sms: int
    capability: tuple[int, int]
    per_host: int


class Times(NamedTuple):
    """Seconds of the timed kernels."""

    products: Mapping[tuple[int, int, int], float]
    attentions: Mapping[int, float]
    """Of the forward pass, by length."""
    copy: float
    """Of `_COPIED` bytes, which are read and written."""
    kernel: float
    """Of a kernel on a few numbers, on the device."""
    launch: float
    """Of the host, for one operator of a training step."""
    all_gather: float | None
    """Of `_GATHERED` bytes among all GPUs of the host. None if the host has one GPU."""


def calibrate_gpu() -> Device:
    """Measures the current GPU, which should do nothing else meanwhile, and returns it as a device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    num_gpus = torch.cuda.device_count()
    facts = Facts(
        name=properties.name,
        memory_bytes=torch.cuda.mem_get_info()[1],
        num_sms=properties.multi_processor_count,
        capability=(properties.major, properties.minor),
        per_host=num_gpus,
    )
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.no_grad():
        products = {shape: _product(shape, device) for shape in PRODUCTS}
        attentions = {length: _attention(length, device) for length in ATTENTIONS}
        copy, kernel = _copy(device), _small_kernel(device)
    launch = _launch(device)
    # The processes of the all-gather use this GPU as well.
    torch.cuda.empty_cache()
    gathered = max(spawn(_all_gather, num_gpus)) if num_gpus > 1 else None
    return fitted(facts, Times(products, attentions, copy, kernel, launch, gathered))


def fitted(facts: Facts, times: Times) -> Device:
    """Returns the device whose model gives these times. Pure.

    A GPU of the table keeps its data sheet's peak. The peak of any other GPU is the throughput of the fastest product,
    and its MFU is relative to that.
    """
    base = _known(facts)
    if base is None:
        best = max(2 * m * n * k / seconds for (m, n, k), seconds in times.products.items())
        base = replace(
            DEVICES["a100"],
            peak=MappingProxyType(
                # Ratios of the A100, by its data sheet.
                {
                    "bfloat16": best,
                    "float16": best,
                    "float8_e4m3fn": best,
                    TF32: best / 2,
                    "float32": best / 16,
                    "float64": best / 32,
                }
            ),
            generation=_generation(facts.capability),
            matmul_share=1.0,
        )
        peak = "peak: the fastest matrix product measured"
    else:
        peak = f"peak: the data sheet of {base.name}"
    local = base.local_bandwidth
    if times.all_gather is not None:
        local = _GATHERED * (facts.per_host - 1) / facts.per_host / times.all_gather
    device = replace(
        base,
        name=facts.name,
        memory_bytes=facts.memory_bytes,
        memory_bandwidth=2 * _COPIED / times.copy,
        memory_share=1.0,  # the measured bandwidth is what a kernel reaches already
        num_sms=facts.num_sms,
        per_host=facts.per_host if facts.per_host > 1 else base.per_host,
        local_bandwidth=local,
        kernel_seconds=times.kernel,
        launch_seconds=times.launch,
        slowest_of=1,  # this GPU was measured alone
        sources=(f"measured on {facts.name}, torch {torch.__version__}", peak),
    )
    device = replace(device, matmul_share=_share(device, times.products))
    return replace(device, attention_share=_attention_share(device, times.attentions))


def _known(facts: Facts) -> Device | None:
    """Returns the table's device for a GPU, or None. A variant with fewer multiprocessors has another peak."""
    for mark, name in _MARKS:
        if mark in facts.name and DEVICES[name].num_sms == facts.num_sms:
            return DEVICES[name]
    return None


def _generation(capability: tuple[int, int]) -> str:
    """Returns the row of NCCL's tuning tables for a GPU."""
    if capability >= (10, 0):
        return "blackwell"
    return "hopper" if capability >= (9, 0) else "ampere"


def _share(device: Device, products: Mapping[tuple[int, int, int], float]) -> float:
    """Returns the share of the peak at which the median ratio of modelled to measured time is 1."""
    low, high = 0.01, 2.0
    for _ in range(40):
        share = (low + high) / 2
        tried = replace(device, matmul_share=share)
        ratios = [matmul_seconds(tried, "bfloat16", 1, *shape) / seconds for shape, seconds in products.items()]
        low, high = (share, high) if statistics.median(ratios) > 1 else (low, share)
    return (low + high) / 2


def _attention_share(device: Device, attentions: Mapping[int, float]) -> float:
    whole = replace(device, attention_share=1.0)
    return statistics.median(
        attention_seconds(whole, "bfloat16", _attention_flops(length), length, length, _HEAD) / seconds
        for length, seconds in attentions.items()
    )


def _attention_flops(length: int) -> float:
    return 4.0 * _HEADS * length * length * _HEAD / 2  # causal: half of it is masked


# On the device


def _seconds(act: Callable[[], object]) -> float:
    """Returns the median time of a call on the device."""
    for _ in range(3):
        act()
    event: Any = torch.cuda.Event
    turns: list[float] = []
    for _ in range(_REPEATS):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        act()
        end.record()
        end.synchronize()
        turns.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(turns)


def _product(shape: tuple[int, int, int], device: torch.device) -> float:
    m, n, k = shape
    left = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    right = torch.randn(k, n, device=device, dtype=torch.bfloat16)
    return _seconds(lambda: left @ right)


def _attention(length: int, device: torch.device) -> float:
    q, k, v = (torch.randn(1, _HEADS, length, _HEAD, device=device, dtype=torch.bfloat16) for _ in range(3))
    return _seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))


def _copy(device: torch.device) -> float:
    source = torch.zeros(_COPIED, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return _seconds(lambda: target.copy_(source))


def _small_kernel(device: torch.device) -> float:
    """Returns the time of a kernel on a few numbers in a CUDA graph, which launches it without the host."""
    values = torch.zeros(8, device=device)
    values.add_(1.0)  # the first launch loads the kernel, which must not be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_IN_GRAPH):
            values.add_(1.0)
    return _seconds(graph.replay) / _IN_GRAPH


def _launch(device: torch.device) -> float:
    """Returns the time of the host for an operator, from a training step whose kernels are as short as they can be."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(64))).to(device)
    inputs = torch.zeros(8, 8, device=device)

    def step() -> None:
        model(inputs).sum().backward()
        # Otherwise the next backward adds to gradients, by kernels that the count below leaves out.
        for each in model.parameters():
            each.grad = None

    # For a layer: a product, two of its gradients, and the sum of the bias's gradient.
    return _seconds(step) / (4 * 64 + 3)


def _all_gather() -> float:
    """Returns the seconds of an all-gather of NCCL. Runs on one rank for each GPU of this host."""
    dist.init_process_group("nccl")
    try:
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.cuda.set_device(rank)
        own = torch.zeros(_GATHERED // size, device="cuda", dtype=torch.uint8)
        whole = torch.empty(len(own) * size, device="cuda", dtype=torch.uint8)
        return _seconds(lambda: dist.all_gather_into_tensor(whole, own))
    finally:
        dist.destroy_process_group()
