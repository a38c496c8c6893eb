"""Does a process take the memory for activations that the plan says?

    python benchmarks/pipeline/experiments/memory.py

Two processes, 32 x (Linear 256 + GELU), 8 microbatches of 1024. The plan's figure is `pipe.memory().planned`: the peak
of the schedule with the activations that were measured in a first step. Beside it stands what the system says that the
process took more at its peak in a third step than before it (VmHWM of /proc/self/status), receive buffers included.

A message that stays in the shared memory where its sender wrote it counts for the process that received it, while it
refers to it. What earlier steps had looked at there does not count before the step: the process lets go of it.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
from pathlib import Path

import torch
from torch import nn

import echelon
from echelon.backends.formats.arena import ARENA_BYTES
from echelon.backends.shared.memory.segment import RANGE_BYTES
from echelon.pipeline import Pipeline, schedules

sys.path.append(str(Path(__file__).parents[2]))
from harness import print_environment, print_head, print_row

RANKS, MICROBATCHES, SAMPLES, WIDTH, DEPTH = 2, 8, 1024, 256, 32
CASES = [("gpipe", False), ("1f1b", False), ("zb-h1", False), ("zb-h2", False), ("zb-v", False), ("v-half", False)]
CASES += [("v-min", False), ("dualpipe-v", False), ("gpipe", True)]
STATUS, CLEAR, MAPS = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/self/maps")


def kibibytes(name: str) -> int:
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1])


def let_go_of_received(rank: int) -> int:
    """Unmaps the messages of other ranks from this process. Returns their bytes.

    A page comes back when it is looked at. A rank's own messages stay: they count for who receives them.
    """
    before = kibibytes("RssShmem")
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    for line in MAPS.read_text().splitlines():
        where, _, offset, *_ = line.split()
        begin, end = (int(number, 16) for number in where.split("-"))
        if "memfd:echelon" in line and end - begin >= ARENA_BYTES and int(offset, 16) // RANGE_BYTES != rank:
            assert madvise(begin, end - begin, mmap.MADV_DONTNEED) == 0, os.strerror(ctypes.get_errno())
    return (before - kibibytes("RssShmem")) * 1024


def run(group: echelon.ProcessGroup, name: str, recompute: bool) -> tuple[int, int, int, int]:
    """Returns bytes: planned, counted, taken by the process, and the received part of them."""
    torch.set_num_threads(1)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    schedule = schedules.build(name, RANKS, MICROBATCHES)
    pipe = Pipeline(
        nn.Sequential(*layers),
        group,
        schedule,
        loss_fn=nn.functional.mse_loss,
        at=cuts(schedule.num_stages),
        recompute=recompute,
    )
    inputs, target = torch.randn(2, MICROBATCHES * SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        pipe.step(inputs, target=target)
    pipe._runtime.buffers.forget_unused()  # they were filled before, and count as activations while they are
    gc.collect()
    group.barrier()
    let_go_of_received(group.rank)
    CLEAR.write_text("5")
    before = kibibytes("VmRSS")
    pipe.step(inputs, target=target)
    taken = (kibibytes("VmHWM") - before) * 1024
    return (*pipe.memory(), taken, let_go_of_received(group.rank))


def cuts(num_stages: int) -> list[str]:
    return [str(2 * DEPTH // num_stages * stage) for stage in range(1, num_stages)]


def main() -> None:
    # Memory that is freed goes back at once.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    print_environment()
    print_head("schedule | rank | planned (MB) | counted (MB) | the process's (MB) | received (MB) | ratio")
    for name, recompute in CASES:
        for rank, sizes in enumerate(echelon.spawn(run, RANKS, (name, recompute))):
            planned, _, taken, _ = sizes
            title = name + (", recomputed" if recompute else "")
            print_row(title, rank, *(f"{size / 1e6:.1f}" for size in sizes), f"{taken / planned:.2f}")


if __name__ == "__main__":
    main()
