"""Which algorithm is the fastest for how many bytes and ranks, over TCP on this machine?

    python benchmarks/collectives/run.py                       # all operations, 2 to 8 ranks, about 4 minutes
    python benchmarks/collectives/run.py --ranks 4 --operations all_reduce

Medians over repetitions, in microseconds, of the slowest rank. The algorithms of an operation take turns, so that what
else the machine does hits all of them alike.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

import echelon
from echelon.collectives.algorithms import OPERATIONS, algorithms_of

SIZES = (8, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20)
TURNS = 5
SECONDS = 0.06
"""How long a turn of one algorithm takes, at least one repetition."""


def call_of(group: echelon.ProcessGroup, operation: str, num_bytes: int) -> Callable[[], object]:
    """Returns a call of an operation; `num_bytes` is what the formulas of the algorithms call n."""
    tensor = torch.ones(max(1, num_bytes // 4))
    part = torch.ones(max(1, num_bytes // 4 // group.world_size))
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(tensor, "max"),
        "reduce": lambda: group.reduce(tensor, 0, "max"),
        "broadcast": lambda: group.broadcast(tensor, 0),
        "all_gather": lambda: group.all_gather(part),
        "reduce_scatter": lambda: group.reduce_scatter(tensor, "max"),
        "gather": lambda: group.gather(part, 0),
        "scatter": lambda: group.scatter(tensor if group.rank == 0 else None, 0),
        "all_to_all": lambda: group.all_to_all(tensor),
        "barrier": group.barrier,
    }
    return calls[operation]


def one_turn(group: echelon.ProcessGroup, call: Callable[[], object], repetitions: int) -> list[float]:
    times = []
    for _ in range(repetitions):
        group.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def measure(group: echelon.ProcessGroup, operation: str, num_bytes: int) -> dict[str, float]:
    """Returns the median time of each algorithm, of the slowest rank."""
    torch.set_num_threads(1)
    variable = f"ECHELON_{operation.upper()}"
    call = call_of(group, operation, num_bytes)
    names = [algorithm.name for algorithm in algorithms_of(operation)]
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(TURNS):
        for name in names:
            os.environ[variable] = name
            warm_up = max(one_turn(group, call, 1))
            slowest = group.all_reduce(torch.tensor([warm_up], dtype=torch.float64), "max").item()
            repetitions = max(1, min(100, int(SECONDS / slowest)))
            mine = torch.tensor(one_turn(group, call, repetitions), dtype=torch.float64)
            del os.environ[variable]
            times[name] += group.all_reduce(mine, "max").tolist()
    return {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}


def measure_all(
    group: echelon.ProcessGroup, operations: list[str], sizes: list[int]
) -> list[tuple[str, int, dict[str, float]]]:
    return [
        (operation, size, measure(group, operation, size))
        for operation in operations
        for size in (sizes if operation != "barrier" else [0])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    arguments = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n")
    print("| ranks | operation | bytes | us by algorithm, the fastest first |\n|---|---|---|---|")
    for num_ranks in arguments.ranks:
        rows = echelon.spawn(measure_all, num_ranks, (arguments.operations, arguments.sizes), backend="tcp")[0]
        for operation, size, times in rows:
            ordered = sorted(times.items(), key=lambda item: item[1])
            cells = ", ".join(f"{name} {microseconds:.0f}" for name, microseconds in ordered)
            print(f"| {num_ranks} | {operation} | {size} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
