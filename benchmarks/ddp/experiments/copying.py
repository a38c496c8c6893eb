"""What does it take to copy new gradients into shared memory, with nothing beside it?

    python benchmarks/ddp/experiments/copying.py
    GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x40000 python benchmarks/ddp/experiments/copying.py

Copies 10 times 4 MiB, which stay in the cache, into 40 MiB of shared memory, which do not: by torch, and by memmove.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time

import torch

NUM_PIECES, PIECE = 10, 1 << 20
"""Of how many float32 each."""


def main() -> None:
    torch.set_num_threads(1)
    fd = os.memfd_create("gradients")
    os.ftruncate(fd, 4 * NUM_PIECES * PIECE)
    bucket = torch.frombuffer(mmap.mmap(fd, 4 * NUM_PIECES * PIECE), dtype=torch.float32).zero_()
    gradients = [torch.randn(PIECE) for _ in range(2)]
    ways = {
        "copy_": lambda view, new: view.copy_(new),
        "memmove": lambda view, new: ctypes.memmove(view.data_ptr(), new.data_ptr(), new.nbytes),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(25):
        for name, copy in ways.items():
            start = time.perf_counter()
            for number, view in enumerate(bucket.split(PIECE)):
                copy(view, gradients[number % 2])
            seconds[name].append(time.perf_counter() - start)
    for name, taken in seconds.items():
        print(f"{name}: {statistics.median(taken[5:]) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
