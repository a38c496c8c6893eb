"""Which algorithm is the fastest for how many bytes and ranks, over TCP on this machine?

    python benchmarks/collectives/run.py                       # all operations, 2 to 8 ranks, about 4 minutes
    python benchmarks/collectives/run.py --ranks 4 --operations all_reduce

Medians of turns, in microseconds, of the slowest rank, measured as `echelon tune` does. The algorithms of an operation
take turns, so that what else the machine does hits all of them alike.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import echelon
from echelon.bench.tune import Timing, time_algorithms
from echelon.collectives.plans.algorithms import OPERATIONS

sys.path.append(str(Path(__file__).parents[1]))
from harness import options_of, print_environment, print_head, print_row

SIZES = (8, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20)
TURNS = 5


def measure_all(group: echelon.ProcessGroup, operations: list[str], sizes: list[int]) -> list[Timing]:
    torch.set_num_threads(1)
    return list(time_algorithms(group, group.world_size, sizes, TURNS, operations))


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    options = parser.parse_args()
    print_environment()
    print_head("ranks | operation | bytes | us by algorithm, the fastest first")
    for num_ranks in options.ranks:
        rows = echelon.spawn(measure_all, num_ranks, (options.operations, options.sizes), backend="tcp")[0]
        for operation, _, size, times in rows:
            ordered = sorted(times.items(), key=lambda item: item[1])
            cells = ", ".join(f"{name} {seconds * 1e6:.0f}" for name, seconds in ordered)
            print_row(num_ranks, operation, size, cells)


if __name__ == "__main__":
    main()
