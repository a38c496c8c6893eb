"""How fast are all-reduces through shared memory, beside Gloo and the memory itself?

    python benchmarks/shared_memory/run.py                 # 2 ranks, about half a minute
    python benchmarks/shared_memory/run.py --ranks 4

Every contestant runs in the same processes, in turns; the others wait. A repetition is the time of one call, of the
slowest rank; the table shows medians over all repetitions. "limit" is what the symmetric tensors cannot avoid: each
rank adds up its slice of all tensors and writes it to all, at the same time as the others, and nobody waits.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed

import echelon

SIZES = (8, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
TURNS = 3
SECONDS = 0.25
"""How long a turn of one contestant takes at least; never fewer than 7 repetitions, and never more than 300."""
PIECE = 64 << 10
"""Elements that are added up and written at a time for the limit."""


def write_slice(tensors: list[torch.Tensor], rank: int) -> None:
    """Adds up one rank's slice of all tensors and writes it to all."""
    slices = [tensor.tensor_split(len(tensors))[rank] for tensor in tensors]
    for parts in zip(*(part.split(PIECE) for part in slices), strict=True):
        torch.add(parts[0], parts[1], out=parts[0])
        for part in parts[2:]:
            parts[0].add_(part)
        for part in parts[1:]:
            part.copy_(parts[0])


def contestants(group: echelon.ProcessGroup, num_bytes: int) -> dict[str, Callable[[], object]]:
    count = num_bytes // 4
    plain, symmetric = torch.zeros(count), group.empty(count).zero_()
    own = [torch.zeros(count) for _ in range(group.world_size)]
    calls: dict[str, Callable[[], object]] = {
        "any tensor": lambda: group.all_reduce(plain),
        "symmetric": lambda: group.all_reduce(symmetric),
        "Gloo": lambda: torch.distributed.all_reduce(plain),
    }
    if num_bytes >= 1 << 20:
        calls["limit"] = lambda: write_slice(own, group.rank)
    return calls


def one_turn(group: echelon.ProcessGroup, call: Callable[[], object]) -> list[float]:
    """Returns the time of each repetition, of the slowest rank."""
    group.barrier()
    start = time.perf_counter()
    call()
    warm = group.all_reduce(torch.tensor([time.perf_counter() - start], dtype=torch.float64), "max").item()
    times = []
    for _ in range(max(7, min(300, int(SECONDS / warm)))):
        group.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return group.all_reduce(torch.tensor(times, dtype=torch.float64), "max").tolist()


def measure(group: echelon.ProcessGroup, path: str, sizes: list[int]) -> list[tuple[int, dict[str, float]]]:
    """Returns the median time of each contestant for each size, in microseconds."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(path, group.world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=group.rank, world_size=group.world_size)
    found = []
    for size in sizes:
        calls = contestants(group, size)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(TURNS):
            for name, call in calls.items():
                times[name] += one_turn(group, call)
        found.append((size, {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}))
    torch.distributed.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    arguments = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    print(f"{arguments.ranks} ranks, one thread each, all_reduce(sum) of float32, medians in microseconds\n")
    print("| bytes | any tensor | symmetric | Gloo | Gloo / any | Gloo / symmetric | limit / symmetric |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        rows = echelon.spawn(measure, arguments.ranks, (path, arguments.sizes), backend="shm")[0]
    for size, times in rows:
        own, shared, gloo = times["any tensor"], times["symmetric"], times["Gloo"]
        limit = f"{times['limit'] / shared:.0%}" if "limit" in times else "-"
        print(f"| {size} | {own:.1f} | {shared:.1f} | {gloo:.0f} | {gloo / own:.1f} | {gloo / shared:.1f} | {limit} |")


if __name__ == "__main__":
    main()
