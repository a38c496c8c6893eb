"""How many messages a second can simulated ranks exchange, and how many ranks fit?

    python benchmarks/simulation/run.py

One process; medians of five. A row's CPU time is that of the process: where the machine is shared, look at that.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import echelon
from echelon import ProcessGroup

REPETITIONS = 5


def ping_pong(group: ProcessGroup, count: int) -> None:
    tensor = torch.ones(1)
    for _ in range(count):
        if group.rank == 0:
            group.send(tensor, 1)
            group.recv(1)
        else:
            group.recv(0)
            group.send(tensor, 0)


def stream(group: ProcessGroup, count: int) -> None:
    tensor = torch.ones(1)
    for _ in range(count):
        if group.rank == 0:
            group.send(tensor, 1)
        else:
            group.recv(0)


def all_reduce(group: ProcessGroup, count: int) -> None:
    tensor = torch.ones(1024)
    for _ in range(count):
        group.all_reduce(tensor)


def ddp_step(group: ProcessGroup) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    ddp = echelon.DDP(model, group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()


def nothing(group: ProcessGroup) -> None:
    group.barrier()


ROWS: tuple[tuple[str, Callable[..., None], int, tuple[int, ...], str], ...] = (
    ("send and recv, to and fro", ping_pong, 2, (3000,), ""),
    ("send and recv, one way", stream, 2, (6000,), ""),
    ("20 ring all-reduces of 4 KiB", all_reduce, 8, (20,), "ring"),
    ("2 ring all-reduces of 4 KiB", all_reduce, 64, (2,), "ring"),
    ("all_reduce of 4 KiB", all_reduce, 256, (1,), ""),
    ("a ring all-reduce of 4 KiB", all_reduce, 256, (1,), "ring"),
    ("DDP: wrapped, one step", ddp_step, 64, (), ""),
    ("barrier", nothing, 256, (), ""),
)


def measure(program: Callable[..., None], world_size: int, args: tuple[int, ...]) -> tuple[float, float, int]:
    """Returns wall seconds, CPU seconds and messages of the median run."""
    runs = []
    for _ in range(REPETITIONS):
        cpu, wall = time.process_time(), time.perf_counter()
        run = echelon.simulate(program, world_size, args)
        runs.append((time.perf_counter() - wall, time.process_time() - cpu, run))
    messages = runs[0][2].trace.count(" sends to rank ")
    return statistics.median(run[0] for run in runs), statistics.median(run[1] for run in runs), messages


def main() -> None:
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}\n")
    print("| program | ranks | messages | seconds | messages/s | messages per CPU second |")
    print("|---|---|---|---|---|---|")
    for name, program, world_size, args, algorithm in ROWS:
        if algorithm:
            os.environ["ECHELON_ALL_REDUCE"] = algorithm
        wall, cpu, messages = measure(program, world_size, args)
        os.environ.pop("ECHELON_ALL_REDUCE", None)
        print(f"| {name} | {world_size} | {messages:,} | {wall:.2f} | {messages / wall:,.0f} | {messages / cpu:,.0f} |")


if __name__ == "__main__":
    main()
