"""How much of a bucket should a rank add and write at a time?

    python benchmarks/ddp/slices.py
    python benchmarks/ddp/slices.py --ranks 4 --mebibytes 40

Buckets of 25 MiB that the ranks share are reduced to their mean, one after the other, with nothing beside it but a
sweep through other memory before each time, as backward is one. Sizes take turns in changing order, all ranks
together: milliseconds of the slowest rank, and the ratio to the size that is used, of each round.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import torch

import echelon
from echelon.backends.shared.collectives import reducing

KIBIBYTES = (64, 128, 256, 512, 1024, 2048)
BUCKET_MEBIBYTES = 25
OTHER_MEBIBYTES = 64


def measure(group: echelon.ProcessGroup, options: argparse.Namespace) -> list[list[float]]:
    """Returns the seconds that the slowest rank took, by round and size."""
    torch.set_num_threads(1)
    in_use = reducing._SLICE_BYTES
    sizes = [in_use, *(kibibytes << 10 for kibibytes in KIBIBYTES if kibibytes << 10 != in_use)]
    whole, rest = divmod(options.mebibytes, BUCKET_MEBIBYTES)
    buckets = [group.empty((size << 20) // 4).normal_() for size in [BUCKET_MEBIBYTES] * whole + [rest] * bool(rest)]
    other = torch.zeros((OTHER_MEBIBYTES << 20) // 4)
    rounds = []
    for number in range(3 + options.rounds):
        seconds = dict.fromkeys(sizes, 0.0)
        shift = number % len(sizes)
        for reducing._SLICE_BYTES in sizes[shift:] + sizes[:shift]:
            other.add_(1.0)
            group.barrier()
            start = time.perf_counter()
            for bucket in buckets:
                group.all_reduce(bucket, "mean")
            seconds[reducing._SLICE_BYTES] = time.perf_counter() - start
        slowest = group.all_reduce(torch.tensor(list(seconds.values()), dtype=torch.float64), "max")
        rounds.append([size >> 10 for size in sizes] if number < 3 else slowest.tolist())
    return rounds[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mebibytes", type=int, default=40, help="of gradients on each rank")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    print(f"{platform.platform()}, Python {platform.python_version()}, torch {torch.__version__}")
    print(f"{options.ranks} ranks, 1 thread each; {options.mebibytes} MiB; medians of {options.rounds} rounds\n")
    sizes, *rounds = echelon.spawn(measure, options.ranks, (options,))[0]
    print("| slices of KiB | ms | ratio to those used |\n|---|---|---|")
    for index, size in enumerate(sizes):
        taken = statistics.median(seconds[index] for seconds in rounds) * 1e3
        ratio = statistics.median(seconds[index] / seconds[0] for seconds in rounds)
        print(f"| {size} | {taken:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
