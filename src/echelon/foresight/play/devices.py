"""The table of devices: data-sheet figures, measured figures of others, and at most two fitted constants each. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from echelon.errors import LaunchError
from echelon.foresight.play.device import Device
from echelon.foresight.trace import GIB, TF32

_A100_PEAK = MappingProxyType(
    {
        # NVIDIA A100 data sheet (2021): tensor cores without sparsity, FP32 without tensor cores
        "int8": 624e12,
        "bfloat16": 312e12,
        "float16": 312e12,
        TF32: 156e12,
        "float32": 19.5e12,
        "float64": 19.5e12,
    }
)
_H100_PEAK = MappingProxyType(
    {
        # NVIDIA H100 data sheet (2023), SXM: half of the figures with sparsity
        "float8_e4m3fn": 1979e12,
        "float8_e5m2": 1979e12,
        "int8": 1979e12,
        "bfloat16": 989.4e12,
        "float16": 989.4e12,
        TF32: 494.7e12,
        "float32": 67e12,
        "float64": 67e12,
    }
)
_B200_PEAK = MappingProxyType(
    {
        # NVIDIA HGX B200 data sheet (2025): half of the figures with sparsity
        "float8_e4m3fn": 4500e12,
        "float8_e5m2": 4500e12,
        "int8": 4500e12,
        "bfloat16": 2250e12,
        "float16": 2250e12,
        TF32: 1100e12,
        "float32": 75e12,
        "float64": 37e12,
    }
)

_SPREAD = 0.0148
"""Standard deviation of the speed of GPUs of one kind.

Sinha et al. (SC22, arXiv 2208.11035) measured five clusters: the whiskers of their box plots are 8 % of the median
apart on average, which is 5.4 standard deviations.
"""

_A100 = Device(
    name="a100",
    peak=_A100_PEAK,
    memory_bytes=int(79.15 * GIB),  # total capacity in PyTorch's errors. CUDA's context and NCCL take some of it
    memory_bandwidth=2.039e12,  # data sheet
    num_sms=108,  # data sheet
    per_host=8,
    local_bandwidth=230e9,  # nccl-tests on DGX A100, all-gather of 1 GiB: 228 to 235 GB/s
    matmul_share=0.738,  # fitted on steps of 8 to 64 GPUs: benchmarks/foresee names the rows
    attention_share=0.60,  # FlashAttention-2 (Dao, 2023), figure 4: 189 of 312 TFLOP/s
    communication_sms=24,  # NCCL's channels on NVSwitch of this generation
    generation="ampere",
    spread=_SPREAD,
    host_link=31.5e9,  # PCIe 4.0 with 16 lanes: 16 GT/s each, 128 of 130 bits are data
    # 24.8 GB/s by nvbandwidth on 8 A100-SXM4-80GB: forums.developer.nvidia.com/t/352186
    host_link_share=0.787,
    host_memory_bandwidth=409.6e9,  # DGX A100: 2 EPYC 7742, each with 8 channels of DDR4-3200
)
_H100 = Device(
    name="h100",
    peak=_H100_PEAK,
    memory_bytes=int(79.10 * GIB),
    memory_bandwidth=3.35e12,  # data sheet
    num_sms=132,  # data sheet
    per_host=8,
    local_bandwidth=350e9,  # nccl-tests on DGX H100, all-gather of 1 GiB: 340 to 365 GB/s
    matmul_share=0.639,  # fitted
    attention_share=0.35,  # FlashAttention-2, figure 7: about 335 of 989 TFLOP/s
    communication_sms=24,
    generation="hopper",
    spread=_SPREAD,
    host_link=63.0e9,  # PCIe 5.0 with 16 lanes: 32 GT/s each
    # 55.4 GB/s to the GPU and 55.2 back by nvbandwidth 0.10 on 8 H100 80GB HBM3, a log on GitHub (July 2026)
    host_link_share=0.879,
    host_memory_bandwidth=614.4e9,  # DGX H100 and H200: 2 Xeon 8480C, each with 8 channels of DDR5-4800
)

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            _A100,
            replace(
                _A100,
                name="a100-40g",
                memory_bytes=int(39.39 * GIB),
                memory_bandwidth=1.555e12,  # data sheet
                matmul_share=0.726,  # fitted
            ),
            _H100,
            replace(
                _H100,
                name="h100-500w",
                memory_bytes=int(95.0 * GIB),
                # as its owner gives it: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md
                memory_bandwidth=2.4e12,
                matmul_share=0.544,  # fitted
            ),
            replace(
                _H100,
                name="h200",
                memory_bytes=int(139.8 * GIB),
                memory_bandwidth=4.8e12,  # data sheet
            ),
            Device(
                name="b200",
                peak=_B200_PEAK,
                # As CUDA reports them, pytorch/ao #4002: 178.35 GiB, 7680 bits at 3996 MHz, 148 multiprocessors.
                memory_bytes=int(178.35 * GIB),
                memory_bandwidth=7.67e12,
                num_sms=148,
                per_host=8,
                local_bandwidth=606e9,  # all-gather by NCCL on 8 B200: SimuMax, configs/system/b200_bf16_ceperm.json
                matmul_share=0.437,  # fitted on two steps of 8 GPUs: benchmarks/foresee/blackwell.py
                # Transformer Engine on B200, 32,768 causal tokens: 1.17 (forward) and 0.87 (backward) of 2,250 TFLOP/s
                # with the masked half counted, from the same file.
                attention_share=0.49,
                communication_sms=24,
                generation="blackwell",
                spread=_SPREAD,
                host_link=63.0e9,  # PCIe 5.0 with 16 lanes
                host_link_share=0.879,  # as measured for H100 on the same link
                host_memory_bandwidth=716.8e9,  # DGX B200: 2 Xeon 8570, each with 8 channels of DDR5-5600
            ),
            Device(
                name="cpu",
                peak=MappingProxyType({"float32": 60e9, "bfloat16": 60e9, "float16": 30e9, "float64": 30e9}),
                memory_bytes=8 * GIB,
                memory_bandwidth=10e9,
                num_sms=1,
                per_host=64,
                local_bandwidth=5e9,
                matmul_share=0.8,
                attention_share=0.3,
                memory_share=0.8,
                tile_seconds=0.0,
                kernel_seconds=1e-6,
                launch_seconds=4e-6,
                communication_sms=0,
                is_synchronous=True,
            ),
        )
    }
)
"""Devices by name. "cpu" is one core of a server with AVX2, in round figures."""


def device_named(name: str) -> Device:
    """Returns a device of the table. Its name may be in capitals.

    Raises:
        LaunchError: no device has that name.
    """
    if (device := DEVICES.get(name.lower())) is not None:
        return device
    # By the whole name of a device, as in "h100-sxm": the b300, a letter apart from the b200, is another device.
    near = max((each for each in DEVICES if each in name.lower()), key=len, default="")
    listed = ", ".join(DEVICES)
    known = f"did you mean {near}? There are {listed}" if near else f"use one of {listed}"
    raise LaunchError(f"gpu={name!r}: {known}, or a calibration file")
