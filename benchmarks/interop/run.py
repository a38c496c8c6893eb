"""What does a program on torch.distributed gain from init_process_group("echelon"), beside Gloo?

    python benchmarks/interop/run.py                # 2 ranks: collectives by size, and a step of torch's DDP and FSDP2
    python benchmarks/interop/run.py --ranks 4

Every rank has a group over Gloo and one over Echelon. In every round both do the same calls of torch.distributed, in
turns of changing order, all ranks together, so that they meet the same noise. Medians over rounds, of the slowest rank.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import echelon
import echelon.interop.torch_distributed  # makes "echelon" a backend of torch.distributed

sys.path.append(str(Path(__file__).parents[1]))
from harness import Act, gloo, in_turns, options_of, print_environment, print_head, print_row, ratio

SIZES = (8, 16 * 2**10, 256 * 2**10, 2**20, 16 * 2**20, 64 * 2**20)
BACKENDS = ("gloo", "echelon")
STEPS = ("DDP", "FSDP2")


def collectives(group: dist.ProcessGroup, size: int) -> dict[str, Act]:
    """Returns calls with `size` bytes in the larger of input and output."""
    num_ranks = dist.get_world_size()
    whole = torch.ones(max(num_ranks, size // 4))
    part = torch.ones(whole.numel() // num_ranks)
    return {
        "all_reduce": lambda: dist.all_reduce(whole.fill_(1.0), group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all_gather_single": lambda: dist.all_gather_single(whole, part, group=group),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(part, whole, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
    }


def training_step(kind: str, group: dist.ProcessGroup, width: int, depth: int) -> Act:
    """Returns a step of SGD on an MLP, of data parallelism of torch."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    model: nn.Module = nn.Sequential(*layers)
    if kind == "DDP":
        model = nn.parallel.DistributedDataParallel(model, process_group=group)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in layers[::2]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(64, width)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def measure(group: echelon.ProcessGroup, rounds: int, store: str) -> list[tuple[str, str, list[list[float]]]]:
    """Returns the name and size of each call, with its seconds over Gloo and over Echelon, by round."""
    found = []
    with gloo(group, store):
        groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}

        def compare(name: str, size: str, acts: dict[str, Act], repeat: int = 1) -> None:
            found.append((name, size, list(in_turns(group, acts, rounds, repeat).seconds.values())))

        for size in SIZES:
            calls = {backend: collectives(each, size) for backend, each in groups.items()}
            for name in calls["gloo"]:
                acts = {backend: each[name] for backend, each in calls.items()}
                compare(name, f"{size:,}", acts, max(1, min(20, 2**20 // size)))
        for kind in STEPS:
            torch.manual_seed(group.rank)
            steps = {backend: training_step(kind, each, 1024, 10) for backend, each in groups.items()}
            compare(f"a step of {kind}", "10.5M parameters", steps)
    return found


if __name__ == "__main__":
    options = options_of(__doc__, rounds=9, ranks=2).parse_args()
    print_environment(
        f"{options.ranks} ranks on one host, 1 thread each, medians of {options.rounds} rounds, microseconds"
    )
    print_head("call | bytes | Gloo | Echelon | Echelon / Gloo")
    with tempfile.TemporaryDirectory() as folder:
        found = echelon.spawn(measure, options.ranks, (options.rounds, os.path.join(folder, "store")))[0]
    for name, size, (theirs, ours) in found:
        medians = (f"{statistics.median(each) * 1e6:,.0f}" for each in (theirs, ours))
        print_row(name, size, *medians, f"{ratio(ours, theirs):.2f}")
