"""Bases of PyTorch's distributed tests, started on forked processes or on simulated ranks."""

from __future__ import annotations

import functools
import os
import unittest
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_fsdp
from torch.testing._internal.common_utils import set_rng_seed

import echelon

# torch reads these as it imports its tests.
os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "4")
from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed._tensor import common_dtensor  # noqa: F401 # before its bases are changed

MANY_GPUS = 4
"""Number of GPUs that tests written for GPUs find when they run on the CPU."""

_PROCESSES = common_distributed.MultiProcessTestCase
_THREADS = common_distributed.MultiThreadedTestCase
_CONTINUOUS = common_distributed.MultiProcContinuousTest


def fork() -> None:
    """Has tests fork their processes, which need not import torch. torch would spawn them."""
    torch.multiprocessing.set_start_method("fork", force=True)

    def start(test: Any) -> None:
        test._start_processes(torch.multiprocessing.get_context("fork").Process)

    _PROCESSES._spawn_processes = start


def simulate() -> None:
    """Has tests that were written for processes or for threads run on simulated ranks."""
    _PROCESSES._spawn_processes = _nothing
    _PROCESSES._start_processes = _nothing
    _PROCESSES._join_processes = _join_processes
    _PROCESSES.run_test = _run_test
    distributed_test.Barrier.sync = lambda *_, **__: echelon.init().barrier()  # torch's polls files, in real time
    # A process has one profiler, and these tests use it on all ranks to count events beside their results.
    torch.autograd.profiler.profile = _NoProfiler
    distributed_test.PROFILING_SUPPORTED_BACKENDS = distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS = []
    _THREADS._spawn_threads = _nothing
    _THREADS._join_threads = None  # replaced for each test by `_join_threads`
    _THREADS.join_or_run = _join_or_run_threads
    _THREADS.run_test_with_threaded_pg = _run_test_of_threads
    common_distributed.spawn_threads_and_init_comms = _on_ranks
    _CONTINUOUS._ensure_processes_spawned = classmethod(_prepare_continuous)
    _CONTINUOUS.task_queues = ()
    _CONTINUOUS._worker_run_main_wait = _join_or_run_continuous
    _CONTINUOUS._init_pg = classmethod(_init_continuous)
    _CONTINUOUS.pg = _DefaultGroup()


def on_cpu() -> None:
    """Lets tests that were written for several GPUs run on the CPU."""
    common_distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda function: function
    common_distributed.requires_nccl = lambda: lambda function: function
    common_distributed.requires_accelerator_dist_backend = lambda *_: lambda function: function
    common_distributed.at_least_x_gpu = lambda _: True
    common_fsdp.DEVICE_COUNT = MANY_GPUS
    # The base that asks for GPUs on the CPU too has the method of its mixin beside its own.
    if "_run" in vars(common_fsdp.FSDPTestMixin):
        del common_fsdp.FSDPTest._run


def _nothing(*_: object, **__: object) -> None: ...


class _NoProfiler(torch.autograd.profiler.profile):
    """Profiler that records nothing."""

    _prepare_trace = _start_trace = __exit__ = _nothing

    def __enter__(self) -> _NoProfiler:
        return self


def _run_ranks(body: Callable[[int], object], world_size: int) -> None:
    """Runs a test as each rank.

    Raises:
        unittest.SkipTest: the ranks have skipped the test.
        Exception: the error of the first failing rank.
    """

    def main() -> int:
        try:
            body(int(os.environ["RANK"]))
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0
        except unittest.SkipTest:
            return common_distributed.TEST_SKIPS["generic"].exit_code
        return 0

    codes = echelon.simulate(main, world_size).results
    for skip in common_distributed.TEST_SKIPS.values():
        if codes[0] == skip.exit_code:
            raise unittest.SkipTest(skip.message)
    if any(codes):
        raise AssertionError(f"ranks ended with status {codes}")


# Tests on processes


def _join_processes(test: Any, function: Callable[..., object]) -> None:
    kind, name = type(test), test._current_test_name()
    options = {"fake_pg": getattr(test, "fake_pg", False)}
    try:
        _run_ranks(lambda rank: kind._run(rank, name, test.file_name, None, **options), int(test.world_size))
    except unittest.SkipTest:
        raise
    except Exception:
        if function not in test.skip_return_code_checks:
            raise


def _run_test(test: Any, name: str, _: object) -> None:
    set_rng_seed()
    getattr(test, name)()
    if test.destroy_pg_upon_exit and dist.is_initialized():
        dist.destroy_process_group()


# Tests on threads


def _join_or_run_threads(test: Any, function: Callable[[], object]) -> Callable[[], None]:
    @functools.wraps(function)
    def run() -> None:
        if test.rank == test.MAIN_THREAD_RANK:
            kind, name = type(test), test._current_test_name
            _run_ranks(lambda rank: kind._run(name, rank, test.world_size), test.world_size)
        else:
            function()

    return run


def _run_test_of_threads(test: Any, name: str, rank: int, world_size: int) -> None:
    dist.init_process_group("threaded", rank=rank, world_size=world_size)
    test.perThreadSetUp()
    set_rng_seed()
    try:
        getattr(test, name)()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        test.perThreadTearDown()


def _on_ranks(function: Any = None, world_size: int = common_distributed.DEFAULT_WORLD_SIZE, **_: object) -> Any:
    """Decorator of a method that runs as each rank, with a default group."""
    if function is None:
        return functools.partial(_on_ranks, world_size=world_size)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        def body(rank: int) -> None:
            dist.init_process_group("threaded", rank=rank, world_size=world_size)
            function(*args, **kwargs)
            if dist.is_initialized():
                dist.destroy_process_group()

        _run_ranks(body, world_size)

    return run


# Tests that share processes


class _DefaultGroup:
    """Default group of the calling rank, in place of an attribute of the class that all ranks share."""

    def __get__(self, instance: object, owner: type) -> Any:
        return dist.distributed_c10d._get_default_group()


def _prepare_continuous(kind: Any) -> None:
    device_type = kind.__dict__.get("device_type", kind.device_type)
    if isinstance(device_type, property):
        device_type = device_type.fget(kind)
    elif callable(device_type) or isinstance(device_type, classmethod):
        device_type = kind.device_type()
    kind.world_size = kind._get_world_size(device_type)
    if kind.world_size == -2:
        raise unittest.SkipTest(f"no {device_type} devices")


def _join_or_run_continuous(test: Any, function: Callable[[], object]) -> Callable[[], None]:
    @functools.wraps(function)
    def run() -> None:
        if test.rank != test.MAIN_PROCESS_RANK:
            function()
            return
        kind, name = type(test), test.id().rpartition(".")[2]

        def body(rank: int) -> None:
            kind._init_pg(rank, kind.world_size, "")
            mine = kind(name)
            mine.rank, mine.world_size = rank, kind.world_size
            set_rng_seed()
            getattr(mine, name)()
            if dist.is_initialized():
                dist.destroy_process_group()

        _run_ranks(body, kind.world_size)

    return run


def _init_continuous(kind: Any, rank: int, world_size: int, _: str) -> None:
    dist.init_process_group(kind.backend_str(), rank=rank, world_size=world_size, pg_options=kind.opts())


HOW: Mapping[str, Callable[[], None]] = {"gloo": fork, "simulated": simulate}
"""Ways to start the ranks of a test."""
