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
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import echelon

sys.path.append(str(Path(__file__).parents[1]))
from harness import Rounds, difference, gloo, in_turns, options_of, print_environment, print_head, print_row

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
    """Times of all ranks together."""

    steps: Rounds
    """Of each variant's step."""
    reductions: Rounds
    """Of reducing all gradients by Echelon, with nothing beside it."""


def training_step(model: nn.Module, batch: torch.Tensor, set_to_none: bool) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def measure(group: echelon.ProcessGroup, options: argparse.Namespace, store: str) -> Measured:
    """Measures on one rank. `store`: file for torch.distributed to start by."""
    with gloo(group, store):
        torch.manual_seed(group.rank)
        task = TASKS[options.model]
        batch = torch.randn(task.batch)
        ours = echelon.DDP(task.make(), group, bucket_mb=options.bucket_mb)
        theirs = nn.parallel.DistributedDataParallel(task.make(), bucket_cap_mb=options.bucket_mb)
        models = dict(zip(VARIANTS, (task.make(), ours, theirs), strict=True))
        acts = {name: training_step(model, batch, options.set_to_none) for name, model in models.items()}
        steps = in_turns(group, acts, options.rounds, warmup=WARMUP)
        return Measured(steps, in_turns(group, {"alone": ours.sync_gradients}, NUM_ALONE, warmup=0))


def report(options: argparse.Namespace) -> None:
    task = TASKS[options.model]
    parameters = sum(parameter.numel() for parameter in task.make().parameters())
    print_environment(
        f"{options.ranks} ranks over {options.backend}, 1 thread each; {options.model} of {parameters / 1e6:.2f}M "
        f"parameters, inputs {tuple(task.batch)} a rank, SGD; buckets of "
        f"{options.bucket_mb:g} MiB; medians of {options.rounds} rounds, in ms"
    )
    columns = "local step | Echelon | torch on Gloo | Echelon adds | torch adds | ratio | Echelon / local"
    print_head(f"zero_grad(set_to_none=) | of | {columns}")
    for options.set_to_none in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (options, os.path.join(folder, "store"))
            steps = echelon.spawn(measure, options.ranks, arguments, backend=options.backend)[0].steps
        for what, times in (("slowest rank", steps.seconds), ("all processors", steps.busy)):
            medians = [statistics.median(each) * 1e3 for each in times.values()]
            added = [difference(times[name], times["local"]) * 1e3 for name in VARIANTS[1:]]
            cells = (*medians, *added, added[0] / added[1], medians[1] / medians[0])
            print_row(options.set_to_none, what, *(f"{value:.2f}" for value in cells))


if __name__ == "__main__":
    parser = options_of(__doc__, rounds=30, ranks=2)
    parser.add_argument("--model", choices=TASKS, default="mlp10m")
    parser.add_argument("--backend", default="auto", help="of Echelon: auto, shm, tcp")
    parser.add_argument("--bucket-mb", type=float, default=25, help="mebibytes, for both")
    report(parser.parse_args())
