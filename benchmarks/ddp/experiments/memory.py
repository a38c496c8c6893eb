"""How much memory does data parallelism take per rank, beside a local model?

    python benchmarks/ddp/experiments/memory.py
    python benchmarks/ddp/experiments/memory.py --ranks 4

Each variant trains for some steps in processes of its own; the figure is what the kernel counts as this process's
memory (Pss: a page that n processes map counts 1 / n to each), after the steps less before the model was made, in bytes
per parameter. Activations are small: one sample a rank.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import echelon

sys.path.append(str(Path(__file__).parents[2]))
from harness import gloo, options_of, print_environment, print_head, print_row

WIDTH, DEPTH = 2048, 10


def resident() -> int:
    """Returns the bytes of memory of this process. A shared page counts by its share."""
    ctypes.CDLL(None).malloc_trim(0)
    match = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert match
    return int(match[1]) * 1024


def model_of(name: str, group: echelon.ProcessGroup) -> nn.Module:
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])
    if name == "torch":
        return nn.parallel.DistributedDataParallel(module)
    if name == "torch, views":
        return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    return module if name == "local" else echelon.DDP(module, group)


def measure(group: echelon.ProcessGroup, name: str, optimizer_name: str, store: str) -> float:
    """Returns bytes per parameter."""
    with gloo(group, store):
        inputs = torch.ones(1, WIDTH)
        (inputs @ torch.ones(WIDTH, WIDTH)).sum()  # memory that torch's kernels need once
        group.all_reduce(torch.ones(1))
        before = resident()
        model = model_of(name, group)
        if optimizer_name == "ZeRO":
            optimizer: torch.optim.Optimizer = echelon.ZeroOptimizer(torch.optim.AdamW, model.parameters(), group)
        else:
            kind = torch.optim.AdamW if optimizer_name == "AdamW" else torch.optim.SGD
            optimizer = kind(model.parameters(), lr=1e-4)
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        group.barrier()
        grown = resident() - before
        group.barrier()
        return grown / (WIDTH * WIDTH * DEPTH)


CASES = (
    ("local", "SGD"),
    ("Echelon", "SGD"),
    ("torch", "SGD"),
    ("torch, views", "SGD"),
    ("Echelon", "AdamW"),
    ("Echelon", "ZeRO"),
)


if __name__ == "__main__":
    ranks = options_of(__doc__, ranks=2).parse_args().ranks
    print_environment(f"{ranks} ranks; {WIDTH * WIDTH * DEPTH / 1e6:.1f}M float32 parameters")
    print_head("model | optimizer | bytes per parameter and rank")
    for name, optimizer_name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (name, optimizer_name, os.path.join(folder, "store"))
            print_row(name, optimizer_name, f"{max(echelon.spawn(measure, ranks, arguments)):.2f}")
