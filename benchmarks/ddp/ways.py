"""Should buckets be reduced beside backward, or behind it, where no core is idle?

    python benchmarks/ddp/ways.py
    python benchmarks/ddp/ways.py --rounds 70

Over shared memory, 2 ranks: a step of a local model, and of DDP that launches full buckets during backward, or one
that holds all when backward has ended. In turns of changing order, all ranks together. Then what the parts of the
difference take with nothing beside them: gradients that autograd has made anew are copied into their buckets, and
buckets are reduced.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import time

import torch
from run import TASKS, WARMUP, Task, training_step

import echelon
from echelon.data_parallel import ddp, reducer

WAYS = {"beside backward": True, "behind backward": False}
PARTS = ("copying alone", "reducing alone")


def measure(group: echelon.ProcessGroup, model: str, rounds: int, set_to_none: bool) -> list[dict[str, float]]:
    """Returns the seconds that the slowest rank's step took, by round and way."""
    torch.set_num_threads(1)
    torch.manual_seed(group.rank)
    task = TASKS[model]
    batch = torch.randn(task.batch)
    names = ["local", *WAYS]
    steps = {
        name: training_step(task.make() if name == "local" else echelon.DDP(task.make(), group), batch, set_to_none)
        for name in names
    }
    measured = []
    for number in range(WARMUP + rounds):
        shift = number % len(names)
        seconds = dict.fromkeys(names, 0.0)
        for name in names[shift:] + names[:shift]:
            way = WAYS.get(name)
            ddp.can_overlap = reducer.can_overlap = lambda _, way=way: way
            group.barrier()
            start = time.perf_counter()
            steps[name]()
            seconds[name] = time.perf_counter() - start
        slowest = group.all_reduce(torch.tensor(list(seconds.values()), dtype=torch.float64), "max").tolist()
        measured.append(dict(zip(names, slowest, strict=True)))
    measured = measured[WARMUP:]
    parts = measure_parts(group, task)
    return [{**each, **part} for each, part in zip(measured, itertools.cycle(parts), strict=False)]


def measure_parts(group: echelon.ProcessGroup, task: Task) -> list[dict[str, float]]:
    """Returns the seconds that copying and reducing all gradients take, of the slowest rank, in some rounds."""
    model = echelon.DDP(task.make(), group)
    training_step(model, torch.randn(task.batch), set_to_none=True)()
    gradients = [parameter.grad for parameter in model.parameters()]
    others = [gradient.clone() for gradient in gradients]
    measured = []
    for _ in range(10):
        group.barrier()
        start = time.perf_counter()
        for gradient, other in zip(gradients, others, strict=True):
            gradient.copy_(other)
        copied = time.perf_counter()
        group.barrier()
        begin = time.perf_counter()
        model.sync_gradients()
        seconds = torch.tensor([copied - start, time.perf_counter() - begin], dtype=torch.float64)
        measured.append(dict(zip(PARTS, group.all_reduce(seconds, "max").tolist(), strict=True)))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=TASKS, default="mlp10m")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    print(
        f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(f"2 ranks, 1 thread each; {options.model}; medians of {options.rounds} rounds\n")
    print("| zero_grad(set_to_none=) | way | step, ms | to a local step |\n|---|---|---|---|")
    for set_to_none in (False, True):
        rounds = echelon.spawn(measure, 2, (options.model, options.rounds, set_to_none))[0]
        for name in rounds[0]:
            step = statistics.median(seconds[name] for seconds in rounds) * 1e3
            ratio = statistics.median(seconds[name] / seconds["local"] for seconds in rounds)
            print(f"| {set_to_none} | {name} | {step:.2f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
