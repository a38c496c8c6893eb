"""How much memory do a message and an all-reduce of 1 GiB need beside their tensors?

    python benchmarks/tcp/experiments/memory.py                # about 10 seconds, 1 GiB in each of 2 processes

Shows by how much the peak of each process's resident memory is above what it had before (VmHWM and VmRSS).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import echelon


def resident(name: str) -> float:
    """Returns VmRSS or VmHWM of this process, in MiB."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def growth(act: Callable[[], object]) -> float:
    """Returns the MiB of the peak during `act` above the resident memory before it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    act()
    return resident("VmHWM") - before


def measure(group: echelon.ProcessGroup, num_bytes: int) -> dict[str, float]:
    tensor = torch.full((num_bytes // 4,), float(group.rank))
    group.all_reduce(torch.ones(1))
    move = partial(group.send, tensor, 1) if group.rank == 0 else partial(group.recv, 0, out=tensor)
    return {"message": growth(move), "all_reduce": growth(lambda: group.all_reduce(tensor))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=1 << 30)
    options = parser.parse_args()
    for rank, grown in enumerate(echelon.spawn(measure, 2, (options.bytes,), backend="tcp")):
        for what, mebibytes in grown.items():
            print(f"rank {rank}, {what} of {options.bytes / 2**20:.0f} MiB: {mebibytes:.1f} MiB more at the peak")
