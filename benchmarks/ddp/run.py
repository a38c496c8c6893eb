"""What does reducing gradients add to a training step, beside what torch's DDP on Gloo adds?

    python benchmarks/ddp/run.py             # 2 ranks, an MLP of 1M parameters; about a minute
    python benchmarks/ddp/run.py --ranks 4 --rounds 50

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

import torch
from torch import nn

import echelon

Step = Callable[[], None]

VARIANTS = ("local", "Echelon", "torch")
WARMUP = 5


def mlp(width: int, depth: int) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers)


def training_step(model: nn.Module, batch: torch.Tensor, set_to_none: bool) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def measure(group: echelon.ProcessGroup, options: argparse.Namespace, store: str) -> list[list[list[float]]]:
    """Returns the seconds of each variant's step by round: those of the slowest rank, then the processors' of all."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=group.rank, world_size=group.world_size
    )
    torch.manual_seed(group.rank)
    batch = torch.randn(options.batch, options.width)
    models = {
        "local": mlp(options.width, options.depth),
        "Echelon": echelon.DDP(mlp(options.width, options.depth), group, bucket_mb=options.bucket_mb),
        "torch": nn.parallel.DistributedDataParallel(
            mlp(options.width, options.depth), bucket_cap_mb=options.bucket_mb
        ),
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
    torch.distributed.destroy_process_group()
    return rounds[WARMUP:]


def report(options: argparse.Namespace) -> None:
    parameters = sum(parameter.numel() for parameter in mlp(options.width, options.depth).parameters())
    print(
        f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(
        f"{options.ranks} ranks, 1 thread each; MLP of {parameters / 1e6:.2f}M parameters, batch of {options.batch} a "
        f"rank, SGD; buckets of {options.bucket_mb:g} MiB; medians of {options.rounds} rounds, in ms\n"
    )
    print("| zero_grad(set_to_none=) | of | local step | Echelon | torch on Gloo | Echelon adds | torch adds | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for options.set_to_none in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            rounds = echelon.spawn(measure, options.ranks, (options, os.path.join(folder, "store")))[0]
        for index, what in enumerate(("slowest rank", "all processors")):
            rows = [times[index] for times in rounds]
            medians = [statistics.median(column) * 1e3 for column in zip(*rows, strict=True)]
            added = [statistics.median(row[column] - row[0] for row in rows) * 1e3 for column in (1, 2)]
            cells = [f"{value:.2f}" for value in (*medians, *added, added[0] / added[1])]
            print(f"| {options.set_to_none} | {what} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="samples per rank")
    parser.add_argument("--bucket-mb", type=float, default=25, help="mebibytes, for both")
    parser.add_argument("--rounds", type=int, default=60)
    report(parser.parse_args())
