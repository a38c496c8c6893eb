"""Time of kernels on a device, by their shapes. Pure.

A matrix product is cut into tiles, which the multiprocessors compute in waves. A wave with few tiles takes as long as a
full one. Each tile also pays for its start and for the writing of its result, so a short inner dimension is slower.
Attention reaches a share of the peak that grows with the length of the sequence. Every other kernel is as fast as
memory. No kernel is shorter than its launch on the device.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from statistics import NormalDist
from typing import NamedTuple, TypeAlias

from echelon.foresight.trace import COMPLEX_PRODUCTS, CONVOLUTIONS, TF32, Copy, HostKernel, Kernel

ITEMSIZES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    TF32: 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "complex64": 8,
    "complex128": 16,
}


class Tile(NamedTuple):
    """Part of a matrix product's result that one multiprocessor computes at a time."""

    rows: int
    columns: int
    share: float
    """Throughput relative to the largest tiles: a smaller tile reuses each loaded number less often."""


TILES = (
    Tile(256, 128, 1.0),
    Tile(128, 256, 1.0),
    Tile(128, 128, 0.92),
    Tile(128, 64, 0.75),
    Tile(64, 128, 0.75),
    Tile(64, 64, 0.55),
)
"""Tile sizes of CUTLASS's kernels for tensor cores. Shares: the ratio of bytes loaded to operations done."""

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of parts into which the inner dimension is cut, so that few tiles fill all multiprocessors."""

ROUGH_PASSES: Mapping[str, float] = {
    # The statistics of all samples come first, so inputs are read twice. Backward reads two of them.
    "native_batch_norm": 3 / 2,
    "native_batch_norm_backward": 5 / 3,
    "native_group_norm": 3 / 2,
    "native_group_norm_backward": 5 / 3,
    # Two kernels: one for the input's gradient, one that reads both inputs again for the gradients of weight and bias.
    "native_layer_norm_backward": 5 / 3,
    "_fused_rms_norm_backward": 5 / 3,
    # The indices are sorted, and rows are added in two passes.
    "embedding_dense_backward": 2.0,
    # Radix sort of 32 bits, 8 at a time: four passes that read and write keys of 4 bytes and indices of 8.
    "sort": 6.0,
    # Radix selection reads the input once for each 8 bits, and once more for the values.
    "topk": 5.0,
}
"""Bytes that a kernel moves, divided by its inputs and outputs, for operators that read their inputs several times."""


Curve: TypeAlias = tuple[tuple[float, float], ...]
"""Points (x, y) of a function in order of x, which is above 0. Between two points it is a power law."""


@dataclass(frozen=True)
class Device:
    """Model of a GPU, or of a CPU core.

    Args:
        name: Name in tables, such as "h100".
        peak: Dense FLOP/s of matrix products by dtype.
        memory_bytes: Memory that a process can use.
        memory_bandwidth: Bytes per second.
        num_sms: Multiprocessors.
        per_host: Devices of one host.
        local_bandwidth: Bytes per second of a ring of collectives inside a host ("bus bandwidth" of nccl-tests).
        matmul_share: Share of the peak that large matrix products reach.
        attention_share: Share of the peak that attention reaches on long sequences.
        memory_share: Share of the memory bandwidth that kernels without matrix products reach.
        tile_seconds: Start of a tile and writing of its result, not hidden by another tile.
        kernel_seconds: The least time of a kernel.
        launch_seconds: Time of the host for an operator that launches a kernel.
        communication_sms: Multiprocessors that a collective takes from kernels.
        host_link: Bytes per second of the link between the host and one GPU, in each direction.
        host_link_share: Share of it that copies of pinned memory reach.
        host_memory_bandwidth: Bytes per second of the memory of a host, all its sockets together.
        host_memory_share: Share of it that operators on tensors of the host reach. It is assumed.
        generation: Row of NCCL's tuning tables: "ampere", "hopper", "blackwell", or "" for devices without NCCL.
        is_synchronous: Whether the host computes the kernels itself, as on a CPU.
        curves: Measured times of a calibrated device, which replace the constants above for kernels. By the name of an
            operator, or "add" for others: (bytes moved, seconds). "attention", "attention_backward": (FLOPs, seconds).
            "matmul_m", "matmul_n", "matmul_k": (length of this side, seconds for a FLOP), with the other sides long.
        networks: Measured (latency, bytes per second) of networks by name, in place of the general table.
        links: Measured times of communication between ranks of a host, by the name of the network, then by kind and
            number of ranks, such as "all_reduce 2": (bytes, processor seconds of each rank).
        machine: Kind of machine that was calibrated. On another one of its kind, a program's kernels can be timed.
        spread: Standard deviation of the speed of devices of this kind, divided by their mean.
        slowest_of: Number of devices in the measurement of the shares of the peak, which are those of the slowest one.
        ideal: Kind of kernels that reach their limit: "matmul" and "attention" the peak. Those of kind "other" take no
            time, as if they were fused into their neighbours. "": none.
        cores: Processors that the ranks of a host share, if `is_synchronous`. 0: each rank has its own.
        sources: Source of each constant.
    """

    name: str
    peak: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    num_sms: int
    per_host: int
    local_bandwidth: float
    matmul_share: float
    attention_share: float
    memory_share: float = 0.80
    tile_seconds: float = 1.5e-6
    kernel_seconds: float = 2.5e-6
    launch_seconds: float = 6e-6
    communication_sms: int = 20
    host_link: float = 31.5e9
    host_link_share: float = 0.79
    host_memory_bandwidth: float = 409.6e9
    host_memory_share: float = 0.80
    generation: str = ""
    is_synchronous: bool = False
    machine: str = ""
    spread: float = 0.0
    slowest_of: int = 8
    cores: int = 0
    ideal: str = ""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    networks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    links: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict)
    sources: tuple[str, ...] = ()

    def __hash__(self) -> int:
        # Caches of times need a hash, which mappings do not have.
        return hash((self.name, self.matmul_share, self.attention_share, self.memory_bandwidth))

    def peak_of(self, dtype: str) -> float:
        """Returns the dense FLOP/s of a dtype. A dtype that is not listed counts as float32."""
        if dtype == "complex128":
            dtype = "float64"
        return self.peak.get(dtype) or self.peak["float32"]

    def slowest(self, num_devices: int) -> Device:
        """Returns the slowest of several devices of this kind, for which the others wait in each step.

        Their speeds are assumed to be normally distributed, with the deviation `spread`.
        """
        if not self.spread:
            return self
        slower = 1 + self.spread * (_expected_maximum(num_devices) - _expected_maximum(self.slowest_of))
        return replace(
            self,
            matmul_share=self.matmul_share / slower,
            attention_share=self.attention_share / slower,
            slowest_of=num_devices,
        )

    def seconds(self, kernel: Kernel) -> float:
        """Returns the time of a kernel that has the device to itself."""
        if kernel.kind == self.ideal:
            return kernel.flops / self.peak_of(kernel.dtype)
        if self.curves:
            return _measured(self.curves, kernel)
        if kernel.kind == "matmul" and kernel.shape:
            moved = kernel.num_bytes if kernel.name in CONVOLUTIONS else None
            return kernel.launches * matmul_seconds(self, kernel.dtype, *kernel.shape, moved)
        if kernel.kind == "attention" and kernel.shape:
            queries, keys, head_dim = kernel.shape[2:]
            moving = kernel.num_bytes / (self.memory_bandwidth * self.memory_share)
            return max(moving, attention_seconds(self, kernel.dtype, kernel.flops, queries, keys, head_dim))
        moving = ROUGH_PASSES.get(kernel.name, 1.0) * kernel.num_bytes / (self.memory_bandwidth * self.memory_share)
        computing = kernel.flops / (self.peak_of(kernel.dtype) * self.matmul_share) if kernel.flops else 0.0
        return max(moving, computing, self.kernel_seconds * kernel.launches)

    def copy_seconds(self, copy: Copy) -> float:
        """Returns the time of a copy between the host and its GPU that has the link to itself."""
        return self.kernel_seconds + copy.num_bytes / (self.host_link * self.host_link_share)

    @property
    def host_bandwidth(self) -> float:
        """Bytes per second at which one rank computes on the host, while all ranks of the host do."""
        return self.host_memory_bandwidth * self.host_memory_share / self.per_host

    def host_seconds(self, kernel: HostKernel) -> float:
        """Returns the time of an operator on tensors of the host: its bytes, and the calls of its parts."""
        return kernel.launches * self.launch_seconds + kernel.num_bytes / self.host_bandwidth


@cache
def _expected_maximum(number: int) -> float:
    """Returns the expected maximum of independent normal variables, in standard deviations."""
    # From -6 to 7 deviations, since a maximum of many lies on the right.
    normal, width = NormalDist(), 0.01
    values = (width * step for step in range(-600, 700))
    return sum(x * number * normal.pdf(x) * normal.cdf(x) ** (number - 1) * width for x in values)


# A step has tens of distinct shapes and thousands of kernels.
@lru_cache(maxsize=100_000)
def matmul_seconds(device: Device, dtype: str, batch: int, m: int, n: int, k: int, moved: int | None = None) -> float:
    """Returns the time of `batch` products of (m, k) by (k, n) matrices.

    Tile size and split of the inner dimension are the fastest ones, as a library finds them by trial. `moved`: bytes
    that the products move, by default those of their matrices.
    """
    if moved is None:
        moved = ITEMSIZES.get(dtype, 4) * batch * (m * k + k * n + m * n)
    streaming = moved / (device.memory_bandwidth * device.memory_share)
    if min(m, n, k) < 1:
        return device.kernel_seconds
    rate = device.peak_of(dtype) * device.matmul_share / device.num_sms
    if dtype.startswith("complex"):
        rate /= COMPLEX_PRODUCTS
    best = math.inf
    for tile in TILES:
        tiles = batch * math.ceil(m / tile.rows) * math.ceil(n / tile.columns)
        for split in SPLITS:
            # Further parts would find no free multiprocessor, or be too short to pay for themselves.
            if split > 1 and (tiles * split > 4 * device.num_sms or k < 256 * split):
                break
            waves = math.ceil(tiles * split / device.num_sms)
            inner = math.ceil(k / split)
            seconds = waves * (2 * tile.rows * tile.columns * inner / (rate * tile.share) + device.tile_seconds)
            if split > 1:  # the parts are written and added in float32
                seconds += (split + 1) * 4 * batch * m * n / (device.memory_bandwidth * device.memory_share)
            best = min(best, seconds)
    return max(best, streaming, device.kernel_seconds)


HALF_LENGTH = 600
"""Length of a sequence at which attention in bfloat16 reaches half of its throughput on long ones.

From FlashAttention-2 (Dao, 2023, figure 4: A100, causal, head dimension 128, forward and backward), which reports
87, 115, 143, 163, 179 and 189 TFLOP/s at 512, 1k, 2k, 4k, 8k and 16k tokens.
"""

ROWS = 64
"""Queries that attention computes at a time. Fewer take as long. All multiprocessors share the keys, however many."""

SMALL_HEAD = 0.9
"""Throughput of attention with a head dimension of 64 or less, relative to 128. From the same figure."""


@lru_cache(maxsize=100_000)
def attention_seconds(device: Device, dtype: str, flops: float, queries: int, keys: int, head_dim: int) -> float:
    """Returns the time of fused attention. `flops` leaves masked parts out."""
    if min(queries, keys) < 1:
        return device.kernel_seconds
    # The rest of the time, such as that of the softmax, does not depend on the type of the products.
    reference = device.peak_of("bfloat16" if "bfloat16" in device.peak else "float16")
    half = HALF_LENGTH * (device.peak_of(dtype) / reference)
    share = device.attention_share * keys / (keys + half) * min(1.0, queries / ROWS)
    if head_dim <= 64:
        share *= SMALL_HEAD
    return max(flops / (device.peak_of(dtype) * share), device.kernel_seconds)


def _measured(curves: Mapping[str, Curve], kernel: Kernel) -> float:
    if kernel.kind == "matmul" and kernel.shape:
        side, length = min(zip("mnk", kernel.shape[1:], strict=True), key=lambda each: each[1])
        return kernel.flops * value_at(curves[f"matmul_{side}"], max(length, 1))
    if kernel.kind == "attention":
        return value_at(curves["attention_backward" if "backward" in kernel.name else "attention"], kernel.flops)
    return value_at(curves.get(kernel.name) or curves["add"], max(kernel.num_bytes, 1))


def value_at(curve: Curve, at: float) -> float:
    """Returns the value of a curve. It is constant before its first point, and extrapolated after the last one."""
    index = min(max(bisect_left(curve, (at, 0.0)), 1), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[index - 1], curve[index]
    if at < curve[0][0]:
        return y0
    exponent = math.log(y1 / y0) / math.log(x1 / x0)
    return y0 * float((at / x0) ** exponent)
