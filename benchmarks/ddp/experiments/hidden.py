"""How much of the communication over 1 Gbit/s and 1 ms can hide behind backward? Simulated: processors do not count.

    python benchmarks/ddp/experiments/hidden.py

Two ranks of Echelon's own code on a virtual clock, with 40 layers of 1 MiB whose backward takes 15 ms each, as
link.py's idle10m. What is not hidden is what DDP adds to the local step, as a share of what the same reduction takes
with nothing beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from scaling import Model

import echelon

sys.path.append(str(Path(__file__).parents[2]))
from harness import print_head, print_row

LAYERS, WIDTH = 40, 512
SECONDS = {"forward": 0.0, "backward": 15e-3}
NETWORK = echelon.Network(latency=1e-3, bandwidth=1e9 / 8)
BUCKETS_MB = (25, 10, 5, 2)


def step_and_reduction(group: echelon.ProcessGroup, bucket_mb: float) -> tuple[float, float]:
    """Returns the virtual seconds of a step, the second, and of the reduction of its gradients once more."""
    ddp = echelon.DDP(Model(group, LAYERS, WIDTH), group, bucket_mb=bucket_mb)
    for _ in range(2):
        ddp.zero_grad()
        group.barrier()
        start = group.backend.now()
        ddp(torch.ones(1)).sum().backward()
        step = group.backend.now() - start
    group.barrier()
    start = group.backend.now()
    ddp.sync_gradients()
    return step, group.backend.now() - start


def slowest(num_ranks: int, bucket_mb: float) -> tuple[float, float]:
    """Returns the same of the slowest rank."""
    results = echelon.simulate(step_and_reduction, num_ranks, (bucket_mb,), network=NETWORK, costs=SECONDS).results
    return max(step for step, _ in results), max(reduction for _, reduction in results)


if __name__ == "__main__":
    print_head("buckets | local step, ms | step | the reduction alone | hidden")
    for bucket_mb in BUCKETS_MB:
        local, _ = slowest(1, bucket_mb)
        step, alone = slowest(2, bucket_mb)
        cells = (f"{seconds * 1e3:.0f}" for seconds in (local, step, alone))
        print_row(f"{bucket_mb} MiB", *cells, f"{1 - (step - local) / alone:.0%}")
