"""Which algorithm is the fastest for how many bytes and ranks, over TCP on this machine?

    python benchmarks/collectives/run.py                       # all operations, 2 to 8 ranks, about 4 minutes
    python benchmarks/collectives/run.py --ranks 4 --operations all_reduce

Medians of turns, in microseconds, of the slowest rank, measured as `echelon tune` does. The algorithms of an operation
take turns, so that what else the machine does hits all of them alike.
"""

from __future__ import annotations

import argparse
import os
import platform

import torch

import echelon
from echelon.bench.tune import Timing, time_algorithms
from echelon.collectives.plans.algorithms import OPERATIONS

SIZES = (8, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20)
TURNS = 5


def measure_all(group: echelon.ProcessGroup, operations: list[str], sizes: list[int]) -> list[Timing]:
    torch.set_num_threads(1)
    return list(time_algorithms(group, group.world_size, sizes, TURNS, operations))


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
        for operation, _, size, times in rows:
            ordered = sorted(times.items(), key=lambda item: item[1])
            cells = ", ".join(f"{name} {seconds * 1e6:.0f}" for name, seconds in ordered)
            print(f"| {num_ranks} | {operation} | {size} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
