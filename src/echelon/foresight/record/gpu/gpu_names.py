"""Names of `torch.cuda` on a machine without a GPU, with their values: streams that only record, facts of the GPU."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from echelon._torch_private.tensors import FakeTensor, real_tensors
from echelon.call_site import with_line
from echelon.errors import UnsupportedOp
from echelon.foresight.record.gpu import streams
from echelon.foresight.record.gpu.device import check_gpu, mapped
from echelon.foresight.record.here import Recording, recording_here
from echelon.foresight.record.log.callers import asked_by_program
from echelon.foresight.record.writer import writer


class Gpu(NamedTuple):
    """Facts of a GPU that a program may ask for."""

    name: str = "NVIDIA H100 80GB HBM3"
    memory_bytes: int = 85_000_000_000
    capability: tuple[int, int] = (9, 0)
    num_multiprocessors: int = 132


def gpu_names(num_devices: int, gpu: Gpu) -> list[tuple[Any, dict[str, Any]]]:
    """Returns modules and classes, each with the values of its names where hosts have GPUs.

    Args:
        num_devices: number of GPUs of the largest host.
        gpu: facts of each.
    """
    memory = _memory_names(gpu)
    ranges = ("range_push", "range_pop", "mark", "range_start", "range_end")
    return [
        # Later ones win. torch asks the module of a mesh's device for streams, which may be the CPU.
        (torch.cpu, _STREAMS),
        (torch.cuda, {**_STREAMS, **memory, **_device_names(num_devices, gpu), **_RANDOM, **_SENSORS, **_TYPES}),
        (torch.cuda, {"memory_snapshot": _SNAPSHOTS["memory_snapshot"]}),
        (torch.cuda, dict.fromkeys(("CUDAGraph", "graph_pool_handle"), _NoGraph)),
        (torch.cuda, {"cudart": _returning(_RUNTIME)}),
        (torch.cuda, _ALLOCATOR),
        (torch.cuda.memory, {**memory, **_SNAPSHOTS, **_ALLOCATOR}),
        (torch.cuda.random, _RANDOM),
        (torch.cuda.tunable, _TUNING),
        (torch.cuda.nvtx, dict.fromkeys(ranges, _nothing)),
        (torch.cuda.profiler, {"start": _nothing, "stop": _nothing}),
        # torch asks for it when it logs an error, and would raise another one.
        (torch.cuda.nccl, {"version": _returning((2, 27, 5))}),
        (torch.version, {"cuda": "12.8"}),
        (torch.backends.cuda, {"is_flash_attention_available": _returning(True)}),
        (torch.backends.cudnn, {"is_available": _returning(True), "version": _returning(91002)}),
        (torch.accelerator, {**memory, **_accelerator_names(gpu)}),
        (torch.accelerator.memory, memory),
        (torch, {"Stream": streams.Stream, "Event": streams.Event, "Generator": _Generator}),
        *((each, {"set_rng_state": _set_rng_state}) for each in (torch, torch.random)),
        (torch.Tensor, {"record_stream": _nothing}),
        (dist, {"is_nccl_available": _returning(True)}),
    ]


def _nothing(*_: object, **__: object) -> None:
    """Does nothing."""


class _NoGraph:
    """Replacement of `torch.cuda.CUDAGraph`, which libraries use in annotations, too."""

    def __init__(self, *_: object, **__: object) -> None:
        graph = with_line("a CUDA graph")
        raise UnsupportedOp(f"{graph} is not foreseen: foresee the script without it, which shows the launches")


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


_SNAPSHOTS: dict[str, Any] = {
    "_record_memory_history": _nothing,
    "_dump_snapshot": _nothing,
    "_snapshot": lambda *_, **__: {"segments": [], "device_traces": []},
    "memory_snapshot": lambda *_, **__: [],
}


class _MemPool:
    """Replacement of `torch.cuda.MemPool`: the allocator's own pool has its tensors, too."""

    id = (0, 1)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def use_count(self) -> int:
        """Returns the number of users of the pool: itself."""
        return 1

    def snapshot(self, *_: object, **__: object) -> list[Any]:
        """Returns the segments of the pool: none."""
        return []


def _assuming(text: str, value: Any) -> Callable[..., Any]:
    """Returns a function that notes an assumption and returns a value."""

    def function(*_: object, **__: object) -> Any:
        if (recording := recording_here()) is not None:
            recording.log.assume(text)
        return value

    return function


_ALLOCATOR: dict[str, Any] = {
    "get_allocator_backend": _returning("native"),
    "MemPool": _MemPool,
    "use_mem_pool": lambda *_, **__: nullcontext(),
    # An address.
    "caching_allocator_alloc": _assuming("memory of torch.cuda.caching_allocator_alloc is not counted", 0),
    "caching_allocator_delete": _nothing,
    "caching_allocator_enable": _nothing,
    "get_per_process_memory_fraction": _returning(1.0),
    "set_per_process_memory_fraction": _assuming("torch.cuda.set_per_process_memory_fraction sets no limit", None),
}
_TUNING: dict[str, Any] = {
    **dict.fromkeys(("enable", "tuning_enable", "record_untuned_enable"), _nothing),
    **dict.fromkeys(("set_max_tuning_duration", "set_max_tuning_iterations", "set_filename"), _nothing),
    **dict.fromkeys(("is_enabled", "tuning_is_enabled", "record_untuned_is_enabled"), _returning(False)),
}
_SENSORS = {name: _returning(0) for name in ("temperature", "power_draw", "clock_rate", "memory_usage")}
_RUNTIME = SimpleNamespace(cudaProfilerStart=_returning(0), cudaProfilerStop=_returning(0))
"""Functions of CUDA's runtime that scripts call by themselves. 0 is success."""


class _TensorType:
    """Replacement of a type such as `torch.cuda.FloatTensor`: makes tensors of one dtype on the GPU."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, *args: Any, **_: Any) -> Tensor:
        """Returns a tensor of a shape, or of the given values."""
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.as_tensor(args[0], dtype=self.dtype, device="cuda")
        return torch.empty(*args or (0,), dtype=self.dtype, device="cuda")

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, FakeTensor) and value.dtype == self.dtype


_TYPES = {
    f"{name}Tensor": _TensorType(dtype)
    for name, dtype in {
        "Float": torch.float32,
        "Double": torch.float64,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}


_STREAMS: dict[str, Any] = {
    "Stream": streams.Stream,
    "ExternalStream": lambda stream_ptr, device=None: streams.Stream(device, number=stream_ptr),
    "Event": streams.Event,
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "set_stream": streams.set_stream,
    "stream": streams.InStream,
    "StreamContext": streams.InStream,
    "synchronize": streams.synchronize,
}


def _random_state(*_: object, **__: object) -> torch.Tensor:
    with real_tensors():
        return torch.zeros(16, dtype=torch.uint8)


_RANDOM: dict[str, Any] = {
    "manual_seed": _nothing,
    "manual_seed_all": _nothing,
    "seed": _nothing,
    "seed_all": _nothing,
    "initial_seed": _returning(0),
    "get_rng_state": _random_state,
    "get_rng_state_all": lambda: [_random_state()],
    "set_rng_state": _nothing,
    "set_rng_state_all": _nothing,
}


_GENERATOR = torch.Generator


class _AnyGenerator(type(_GENERATOR)):  # type: ignore[misc]
    """Metaclass by which generators from before the recording are instances of `torch.Generator`, too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _GENERATOR)


class _Generator(_GENERATOR, metaclass=_AnyGenerator):
    """Replacement of `torch.Generator`: for a GPU it is a generator of the CPU, as tensors have no values."""

    _device: torch.device

    def __new__(cls, device: Any = "cpu") -> _Generator:
        generator: _Generator = super().__new__(cls, mapped(device))  # type: ignore[call-arg]
        generator._device = torch.device(device)
        return generator

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device that the program has asked for, which libraries compare with that of tensors."""
        return self._device if asked_by_program(2) else torch.device("cpu")

    def get_state(self) -> Tensor:
        """Returns the state, which has 16 bytes for a GPU."""
        return super().get_state() if self._device.type == "cpu" else _random_state()

    def set_state(self, new_state: Tensor) -> torch.Generator:
        """Sets the state, unless it is of a GPU, or its values are unknown, as of one that another rank has sent."""
        return super().set_state(new_state) if self._device.type == "cpu" and _is_known_state(new_state) else self


_SET_RNG_STATE = torch.set_rng_state


def _set_rng_state(new_state: Tensor) -> None:
    if _is_known_state(new_state):
        _SET_RNG_STATE(new_state)


def _is_known_state(state: Tensor) -> bool:
    recording = recording_here() if isinstance(state, FakeTensor) else None
    if recording is not None:
        recording.log.assume("a random generator keeps its state, since values of the new one are unknown")
    return recording is None


def _device_names(num_devices: int, gpu: Gpu) -> dict[str, Any]:
    properties = SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.num_multiprocessors,
        warp_size=32,
        is_integrated=False,
        is_multi_gpu_board=False,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        # Bytes of a block: 227 KiB on Hopper, 163 KiB on Ampere.
        shared_memory_per_block_optin=232448 if gpu.capability >= (9, 0) else 166912,
        # One KiB more, which CUDA keeps for itself in each block.
        shared_memory_per_multiprocessor=233472 if gpu.capability >= (9, 0) else 167936,
        L2_cache_size=50 << 20,
        uuid=uuid.UUID(int=0),
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
    )
    return {
        "is_available": _returning(True),
        "is_initialized": _returning(True),
        "init": _nothing,
        "_lazy_init": _nothing,
        "device_count": _device_count,
        "default_generators": tuple(_Generator(f"cuda:{number}") for number in range(num_devices)),
        "current_device": _current_device,
        "set_device": set_device,
        "device": _Device,
        "get_device_name": _returning(gpu.name),
        "get_device_capability": _returning(gpu.capability),
        "get_device_properties": _returning(properties),
        "get_arch_list": _returning([f"sm_{gpu.capability[0]}{gpu.capability[1]}"]),
        "can_device_access_peer": _returning(True),
        "is_bf16_supported": _returning(True),
        "is_tf32_supported": _returning(True),
        "is_current_stream_capturing": _returning(False),
        "ipc_collect": _nothing,
        "set_sync_debug_mode": _nothing,
        "get_sync_debug_mode": _returning(0),
        "current_blas_handle": _returning(0),
        "utilization": _returning(0),
    }


def _accelerator_names(gpu: Gpu) -> dict[str, Any]:
    return {
        "is_available": _returning(True),
        "device_count": _device_count,
        "current_accelerator": _returning(torch.device("cuda")),
        "current_device_index": _current_device,
        "current_device_idx": _current_device,
        "set_device_index": set_device,
        "set_device_idx": set_device,
        "device_index": _Device,
        "get_device_capability": _returning({"capability": gpu.capability}),
        "current_stream": streams.current_stream,
        "set_stream": streams.set_stream,
        "synchronize": streams.synchronize,
        "Graph": _NoGraph,
    }


def _device_count() -> int:
    recording = writer()  # also in a thread of the program
    return 0 if recording is None else recording.log.gpus.count


def _current_device() -> int:
    recording = recording_here()
    return 0 if recording is None else recording.log.gpus.current


def set_device(device: Any) -> None:
    """Makes a GPU the current one of the calling rank."""
    if (recording := recording_here()) is not None:
        if (number := _number(device)) is None:
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
        if number >= 0:  # as in torch, -1 means no change
            check_gpu(number)
            recording.log.gpus.current = number


def _number(device: Any) -> int | None:
    if isinstance(device, str | torch.device):
        return torch.device(device).index
    return device if isinstance(device, int) else None


class _Device:
    """Context in which another GPU is current, as `torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._outer = 0

    def __enter__(self) -> None:
        self._outer = _current_device()
        if self._device is not None and _number(self._device) is not None:
            set_device(self._device)

    def __exit__(self, *_: object) -> None:
        set_device(self._outer)


def _memory_names(gpu: Gpu) -> dict[str, Any]:
    def of(read: Callable[[Recording], int]) -> Callable[..., int]:
        return lambda *_, **__: 0 if (recording := recording_here()) is None else read(recording)

    live, peak = of(lambda recording: recording.memory.num_bytes), of(lambda recording: recording.memory.peak)

    def reset_peak(*_: object, **__: object) -> None:
        if (recording := recording_here()) is not None:
            recording.memory.peak = recording.memory.num_bytes

    def stats(*_: object, **__: object) -> dict[str, int]:
        names = {
            "allocated_bytes": (live(), peak()),
            "reserved_bytes": (peak(), peak()),
            "active_bytes": (live(), peak()),
        }
        found = {f"{name}.all.{kind}": value for name, (now, most) in names.items()
                 for kind, value in (("current", now), ("peak", most))}  # fmt: skip
        return Counter(found)  # others, such as numbers of requests, are 0

    def free(*_: object, **__: object) -> tuple[int, int]:
        # The caching allocator keeps the memory that it once had.
        return max(0, gpu.memory_bytes - peak()), gpu.memory_bytes

    return {
        "memory_allocated": live,
        "max_memory_allocated": peak,
        "memory_reserved": peak,
        "max_memory_reserved": peak,
        "memory_stats": stats,
        "memory_summary": _returning(""),
        "reset_peak_memory_stats": reset_peak,
        "device_memory_used": peak,
        "reset_max_memory_allocated": reset_peak,
        "reset_accumulated_memory_stats": _nothing,
        **dict.fromkeys(("empty_cache", "empty_host_cache"), _nothing),
        **dict.fromkeys(("reset_peak_host_memory_stats", "reset_accumulated_host_memory_stats"), _nothing),
        "mem_get_info": free,
        "get_memory_info": free,
    }
