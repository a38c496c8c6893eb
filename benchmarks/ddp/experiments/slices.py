"""How much of a bucket should a rank add and write at a time?

    python benchmarks/ddp/experiments/slices.py
    python benchmarks/ddp/experiments/slices.py --ranks 4 --mebibytes 40

Buckets of 25 MiB that the ranks share are reduced to their mean, one after the other, with nothing beside it but a
sweep through other memory before each time, as backward is one. Sizes take turns in changing order, all ranks
together: milliseconds of the slowest rank, and the ratio to the size that is used, of each round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import echelon
from echelon.backends.shared.collectives import reducing

sys.path.append(str(Path(__file__).parents[2]))
from harness import in_turns, ms, options_of, print_environment, print_head, print_row, ratio

KIBIBYTES = (64, 128, 256, 512, 1024, 2048)
BUCKET_MEBIBYTES = 25
OTHER_MEBIBYTES = 64


def measure(group: echelon.ProcessGroup, options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the seconds of the slowest rank by size. The size in use comes first."""
    torch.set_num_threads(1)
    in_use = reducing._SLICE_BYTES >> 10
    sizes = [in_use, *(size for size in KIBIBYTES if size != in_use)]
    whole, rest = divmod(options.mebibytes, BUCKET_MEBIBYTES)
    buckets = [group.empty((size << 20) // 4).normal_() for size in [BUCKET_MEBIBYTES] * whole + [rest] * bool(rest)]
    other = torch.zeros((OTHER_MEBIBYTES << 20) // 4)

    def by_slices_of(kibibytes: int) -> Callable[[], None]:
        def act() -> None:
            reducing._SLICE_BYTES = kibibytes << 10
            for bucket in buckets:
                group.all_reduce(bucket, "mean")

        return act

    acts = {str(size): by_slices_of(size) for size in sizes}
    return in_turns(group, acts, options.rounds, before=lambda: other.add_(1.0)).seconds


def main() -> None:
    parser = options_of(__doc__, rounds=30, ranks=2)
    parser.add_argument("--mebibytes", type=int, default=40, help="of gradients on each rank")
    options = parser.parse_args()
    print_environment(
        f"{options.ranks} ranks, 1 thread each; {options.mebibytes} MiB; medians of {options.rounds} rounds"
    )
    seconds = echelon.spawn(measure, options.ranks, (options,))[0]
    print_head("slices of KiB | ms | ratio to those used")
    in_use = next(iter(seconds.values()))
    for size, taken in seconds.items():
        print_row(size, ms(taken), f"{ratio(taken, in_use):.2f}")


if __name__ == "__main__":
    main()
