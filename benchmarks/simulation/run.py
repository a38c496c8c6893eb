"""How many messages a second can simulated ranks exchange, and how many ranks fit?

    python benchmarks/simulation/run.py

One process; medians of five. "start" is what as many ranks take that do nothing; the second rate is without that. A
row's CPU time is that of the process: where the machine is shared, look at that. Memory is measured in processes of
their own.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import echelon
from echelon import ProcessGroup

sys.path.append(str(Path(__file__).parents[1]))
from harness import print_environment, print_head, print_row

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


def barriers(group: ProcessGroup, count: int) -> None:
    for _ in range(count):
        group.barrier()


def nothing(_: ProcessGroup) -> None: ...


ROWS: tuple[tuple[str, Callable[..., None], int, tuple[int, ...], str], ...] = (
    ("send and recv, to and fro", ping_pong, 2, (3000,), ""),
    ("send and recv, one way", stream, 2, (6000,), ""),
    ("20 ring all-reduces of 4 KiB", all_reduce, 8, (20,), "ring"),
    ("2 ring all-reduces of 4 KiB", all_reduce, 64, (2,), "ring"),
    ("all_reduce of 4 KiB", all_reduce, 256, (1,), ""),
    ("20 all-reduces of 4 KiB", all_reduce, 256, (20,), ""),
    ("a ring all-reduce of 4 KiB", all_reduce, 256, (1,), "ring"),
    ("DDP: wrapped, one step", ddp_step, 64, (), ""),
    ("barrier", barriers, 256, (1,), ""),
    ("20 barriers", barriers, 256, (20,), ""),
)


class Row(NamedTuple):
    """Medians of one program."""

    wall: float
    cpu: float
    messages: int


def measure(program: Callable[..., None], world_size: int, args: tuple[int, ...]) -> Row:
    """Returns wall seconds, CPU seconds and messages of the median run."""
    runs = []
    for _ in range(REPETITIONS):
        cpu, wall = time.process_time(), time.perf_counter()
        run = echelon.simulate(program, world_size, args, collectives="messages")
        runs.append((time.perf_counter() - wall, time.process_time() - cpu))
    messages = run.trace.count(" sends to rank ")
    return Row(statistics.median(wall for wall, _ in runs), statistics.median(cpu for _, cpu in runs), messages)


def peak_kib(code: str) -> int:
    """Returns the most memory that a process of its own needs for a line of Python, in KiB."""
    program = (
        "import torch, echelon\n"
        "echelon.simulate(lambda group: group.barrier(), 2)\n"
        f"{code}\nprint(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120)
    return int(done.stdout)


def memory() -> tuple[float, float]:
    """Returns the memory of a rank, in MB, and that of a message in the trace, in kB."""
    nothing_more = peak_kib("")
    ranks = peak_kib("run = echelon.simulate(lambda group: group.barrier(), 256)")
    many = "run = echelon.simulate(lambda group: [group.barrier() for _ in range({})], 8)"
    few, more = peak_kib(many.format(2000)), peak_kib(many.format(6000))
    return (ranks - nothing_more) * 1.024e-3 / 256, (more - few) * 1.024 / (4000 * 8 * 3)


def main() -> None:
    print_environment()
    print_head("program | ranks | messages | seconds | start | messages/s | after the start | per CPU second")
    for name, program, world_size, args, algorithm in ROWS:
        start = measure(nothing, world_size, ())
        if algorithm:
            os.environ["ECHELON_ALL_REDUCE"] = algorithm
        row = measure(program, world_size, args)
        os.environ.pop("ECHELON_ALL_REDUCE", None)
        rates = (row.messages / row.wall, row.messages / (row.wall - start.wall), row.messages / row.cpu)
        cells = (f"{row.messages:,}", f"{row.wall:.2f}", f"{start.wall:.2f}", *(f"{rate:,.0f}" for rate in rates))
        print_row(name, world_size, *cells)
    rank, message = memory()
    print(f"\na rank: {rank:.2f} MB beside its tensors; a message: {message:.1f} kB of trace")


if __name__ == "__main__":
    main()
