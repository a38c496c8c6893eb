"""What does a program on torch.distributed gain from init_process_group("echelon"), beside Gloo?

    python benchmarks/interop/run.py                # 2 ranks: collectives by size, and a step of torch's DDP and FSDP2
    python benchmarks/interop/run.py --ranks 4

Every rank has a group over Gloo and one over Echelon. In every round both do the same calls of torch.distributed, in
turns of changing order, all ranks together, so that they meet the same noise. Medians over rounds, of the slowest rank.
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
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import echelon
import echelon.interop.torch_distributed  # makes "echelon" a backend of torch.distributed

Act = Callable[[], object]

SIZES = (8, 16 * 2**10, 256 * 2**10, 2**20, 16 * 2**20, 64 * 2**20)
WARMUP = 3
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


def in_turns(group: echelon.ProcessGroup, acts: list[Act], rounds: int, repeat: int) -> list[list[float]]:
    """Returns the seconds that one call of each of `acts` took the slowest rank, by round."""
    found = []
    for number in range(WARMUP + rounds):
        seconds = [0.0] * len(acts)
        for index in range(len(acts)):
            chosen = (index + number) % len(acts)
            group.barrier()
            start = time.perf_counter()
            for _ in range(repeat):
                acts[chosen]()
            seconds[chosen] = (time.perf_counter() - start) / repeat
        found.append(group.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max").tolist())
    return found[WARMUP:]


def measure(group: echelon.ProcessGroup, rounds: int, store: str) -> list[tuple[str, str, list[list[float]]]]:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=group.rank, world_size=group.world_size)
    groups = [dist.new_group(backend=backend) for backend in BACKENDS]
    found = []
    for size in SIZES:
        both = [collectives(each, size) for each in groups]
        for name in both[0]:
            repeat = max(1, min(20, 2**20 // size))
            found.append((name, f"{size:,}", in_turns(group, [calls[name] for calls in both], rounds, repeat)))
    for kind in STEPS:
        torch.manual_seed(group.rank)
        acts = [training_step(kind, each, 1024, 10) for each in groups]
        found.append((f"a step of {kind}", "10.5M parameters", in_turns(group, acts, rounds, 1)))
    dist.destroy_process_group()
    return found


def report(num_ranks: int, rounds: int) -> None:
    print(
        f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(f"{num_ranks} ranks on one host, 1 thread each, medians of {rounds} rounds, microseconds\n")
    print("| what | bytes | Gloo | Echelon | Echelon / Gloo |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        found = echelon.spawn(measure, num_ranks, (rounds, os.path.join(folder, "store")))[0]
    for name, size, seconds in found:
        gloo, ours = (statistics.median(column) * 1e6 for column in zip(*seconds, strict=True))
        ratio = statistics.median(row[1] / row[0] for row in seconds)
        print(f"| {name} | {size} | {gloo:,.0f} | {ours:,.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    report(options.ranks, options.rounds)
