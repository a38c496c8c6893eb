"""What does reducing gradients add to a training step, beside what torch's DDP on Gloo adds?

    python benchmarks/ddp/run.py                                  # 2 ranks, an MLP of 10M parameters, shared memory
    python benchmarks/ddp/run.py --model gpt10m --ranks 4 --rounds 12
    python benchmarks/ddp/run.py --model mlp1m --backend tcp

In every round each rank takes one step of a local model, of Echelon's DDP and of torch's, in turns of changing order,
all ranks together. So the three meet the same noise. The table shows medians over rounds: of the slowest rank's time,
and of the processor time of all ranks, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import echelon

Step = Callable[[], None]

VARIANTS = ("local", "Echelon", "torch")
WARMUP = 5
NUM_ALONE = 5
"""Reductions measured with nothing beside them."""
IDLE_SECONDS = 0.015
"""Of each layer of idle10m, in backward."""


def mlp(width: int, depth: int) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers)


def gpt(width: int, depth: int) -> nn.Module:
    """Returns blocks of attention and MLP, each of 12 width**2 parameters, for embedded sequences."""
    block = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(block, depth, enable_nested_tensor=False)


class Idle(torch.autograd.Function):
    """Takes time in backward as an accelerator does: the processors have nothing to do meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.shape = weight.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(IDLE_SECONDS)
        return gradient, torch.zeros(1).expand(ctx.shape).clone()


class IdleLayer(nn.Module):
    """A square matrix with which nothing is computed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Idle.apply(x, self.weight)


class Task(NamedTuple):
    """A model and the shape of one rank's batch."""

    make: Callable[[], nn.Module]
    batch: tuple[int, ...]


TASKS = {
    "mlp1m": Task(lambda: mlp(512, 4), (64, 512)),
    "mlp10m": Task(lambda: mlp(1024, 10), (64, 1024)),
    "gpt10m": Task(lambda: gpt(320, 8), (4, 64, 320)),
    "gpt10m-large": Task(lambda: gpt(320, 8), (16, 64, 320)),
    "idle10m": Task(lambda: nn.Sequential(*[IdleLayer(512) for _ in range(40)]), (1, 512)),
    "gpt40m": Task(lambda: gpt(640, 8), (4, 64, 640)),
}


class Measured(NamedTuple):
    """What all ranks together took."""

    rounds: list[list[list[float]]]
    """By round: seconds of each variant's step, of the slowest rank; then of the processors of all."""
    reductions: list[float]
    """Seconds to reduce all gradients by Echelon, with nothing beside it."""
    reductions_busy: list[float]
    """And of the processors of all."""


def training_step(model: nn.Module, batch: torch.Tensor, set_to_none: bool) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def measure(group: echelon.ProcessGroup, options: argparse.Namespace, store: str) -> Measured:
    """Measures on one rank; `store` is a file for torch.distributed to start by."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=group.rank, world_size=group.world_size
    )
    torch.manual_seed(group.rank)
    task = TASKS[options.model]
    batch = torch.randn(task.batch)
    models = {
        "local": task.make(),
        "Echelon": echelon.DDP(task.make(), group, bucket_mb=options.bucket_mb),
        "torch": nn.parallel.DistributedDataParallel(task.make(), bucket_cap_mb=options.bucket_mb),
    }
    steps = {name: training_step(models[name], batch, options.set_to_none) for name in VARIANTS}
    rounds = []
    for number in range(WARMUP + options.rounds):
        seconds = {}
        shift = number % len(VARIANTS)
        for name in VARIANTS[shift:] + VARIANTS[:shift]:
            group.barrier()
            start, start_busy = time.perf_counter(), time.process_time()
            steps[name]()
            seconds[name] = time.perf_counter() - start, time.process_time() - start_busy
        elapsed, busy = torch.tensor([seconds[name] for name in VARIANTS], dtype=torch.float64).t().contiguous()
        rounds.append([group.all_reduce(elapsed, "max").tolist(), group.all_reduce(busy, "sum").tolist()])
    reductions, reductions_busy = [], []
    for _ in range(NUM_ALONE):
        group.barrier()
        start, start_busy = time.perf_counter(), time.process_time()
        models["Echelon"].sync_gradients()
        elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        busy = torch.tensor([time.process_time() - start_busy], dtype=torch.float64)
        reductions += group.all_reduce(elapsed, "max").tolist()
        reductions_busy += group.all_reduce(busy, "sum").tolist()
    torch.distributed.destroy_process_group()
    return Measured(rounds[WARMUP:], reductions, reductions_busy)


def report(options: argparse.Namespace) -> None:
    task = TASKS[options.model]
    parameters = sum(parameter.numel() for parameter in task.make().parameters())
    print(
        f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(
        f"{options.ranks} ranks over {options.backend}, 1 thread each; {options.model} of {parameters / 1e6:.2f}M "
        f"parameters, inputs {tuple(task.batch)} a rank, SGD; buckets of "
        f"{options.bucket_mb:g} MiB; medians of {options.rounds} rounds, in ms\n"
    )
    columns = "local step | Echelon | torch on Gloo | Echelon adds | torch adds | ratio | Echelon / local"
    print(f"| zero_grad(set_to_none=) | of | {columns} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for options.set_to_none in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (options, os.path.join(folder, "store"))
            rounds = echelon.spawn(measure, options.ranks, arguments, backend=options.backend)[0].rounds
        for index, what in enumerate(("slowest rank", "all processors")):
            rows = [times[index] for times in rounds]
            medians = [statistics.median(column) * 1e3 for column in zip(*rows, strict=True)]
            added = [statistics.median(row[column] - row[0] for row in rows) * 1e3 for column in (1, 2)]
            cells = [f"{value:.2f}" for value in (*medians, *added, added[0] / added[1], medians[1] / medians[0])]
            print(f"| {options.set_to_none} | {what} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=TASKS, default="mlp10m")
    parser.add_argument("--backend", default="auto", help="of Echelon: auto, shm, tcp")
    parser.add_argument("--bucket-mb", type=float, default=25, help="mebibytes, for both")
    parser.add_argument("--rounds", type=int, default=30)
    report(parser.parse_args())
