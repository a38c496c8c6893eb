"""Small operations and steps of two checkouts, in turns: what did a change cost, or gain?"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness import options_of, print_environment, print_head, print_row

if TYPE_CHECKING:
    from echelon import ProcessGroup

HERE = Path(__file__).resolve().parents[1]
SIZES = ((8, 300), (1 << 10, 300), (1 << 14, 200), (1 << 16, 100), (1 << 18, 50), (1 << 20, 20), (16 << 20, 3))
"""Bytes, and calls in a turn."""
TURNS = 15


def microseconds(group: ProcessGroup, act, calls: int) -> float:
    """Returns the median of the turns."""
    for _ in range(3):
        act()
    turns = []
    for _ in range(TURNS):
        group.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            act()
        turns.append((time.perf_counter() - begin) / calls * 1e6)
    return statistics.median(turns)


def acts(group: ProcessGroup) -> Iterator[tuple[str, object, int]]:
    """Yields the name of each contest, its call, and the calls in a turn."""
    import torch
    from torch import nn

    import echelon
    from echelon.pipeline import Pipeline

    for size, calls in SIZES:
        tensor, out = torch.ones(size // 4), torch.empty(size // 4)
        yield f"all_reduce {size} B", lambda tensor=tensor: group.all_reduce(tensor), calls

        def to_and_fro(tensor=tensor, out=out):
            if group.rank == 0:
                group.send(tensor, 1)
                group.recv(1, out=out)
            else:
                group.recv(0, out=out)
                group.send(tensor, 0)

        yield f"send and recv {size} B, to and fro", to_and_fro, calls
    some, work = torch.ones(2), random.Random(group.rank)

    def after_work():
        until = time.perf_counter() + work.random() * 30e-6
        while time.perf_counter() < until:
            pass
        group.all_reduce(some)

    yield "all_reduce 8 B after 0 to 30 us of work", after_work, 300
    kib = torch.ones(256)
    yield "barrier", group.barrier, 300
    for kind in ("broadcast", "all_gather", "reduce_scatter", "all_to_all"):
        yield f"{kind} 1024 B", lambda kind=kind: getattr(group, kind)(kib), 300

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)))
    ddp = echelon.DDP(model, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(32, 256)

    def step():
        ddp(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    yield "DDP step, 0.5 M parameters", step, 20
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)))
    inputs, target = torch.randn(32, 64), torch.randn(32, 64)
    for schedule in ("1f1b", "zb-h1"):
        pipe = Pipeline(layers, group=group, schedule=schedule, num_microbatches=8, loss_fn=nn.functional.mse_loss)
        yield f"{schedule} step, 8 microbatches", lambda pipe=pipe: pipe.step(inputs, target=target), 20


def measure(group: ProcessGroup) -> dict[str, float]:
    """Returns microseconds by contest, as rank 0 sees them."""
    import torch

    torch.set_num_threads(1)
    return {name: microseconds(group, act, calls) for name, act, calls in acts(group)}


def run(checkout: Path, backend: str) -> dict[str, float]:
    """Returns the figures of a checkout, measured in processes of its own."""
    env = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(
        [sys.executable, __file__, "--measure", backend], env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints the table."""
    parser = options_of(__doc__, rounds=4)
    parser.add_argument("before", nargs="?", type=Path, help="folder of the other checkout")
    parser.add_argument("--measure", metavar="BACKEND", help="print the figures of the importable Echelon alone")
    options = parser.parse_args()
    if options.measure:
        import echelon

        print(json.dumps(echelon.spawn(measure, 2, backend=options.measure)[0]))
        return
    if options.before is None or not (options.before / "src" / "echelon").is_dir():
        parser.error("give the folder of the other checkout, as made by: git worktree add ../before COMMIT")
    print_environment(f"2 ranks, 1 thread each, medians of {options.rounds} runs in turns, each of {TURNS} turns")
    print_head("backend | operation | before, us | after, us | after / before")
    for backend in ("shm", "tcp"):
        pairs = [(run(options.before, backend), run(HERE, backend)) for _ in range(options.rounds)]
        for name in pairs[0][0]:
            before, after = ([pair[index][name] for pair in pairs] for index in range(2))
            ratio = statistics.median(b / a for a, b in zip(before, after, strict=True))
            print_row(backend, name, *(f"{statistics.median(each):.1f}" for each in (before, after)), f"{ratio:.2f}")


if __name__ == "__main__":
    main()
