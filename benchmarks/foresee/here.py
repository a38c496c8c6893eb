"""Does a foreseen step take as long as a real one on the processors of this machine?

    python benchmarks/foresee/here.py                          # calibrates, then runs and foresees all programs
    python benchmarks/foresee/here.py --device cpu.json fsdp   # with an earlier calibration, some of the programs

Each program runs on real processes of one thread each, in turns with the others, and its step is the median of the
runs' medians. A row whose middle half of the runs is wider than 5 percent is shown and not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import echelon
from echelon import Network
from echelon.foresight.calibrate import calibrate
from echelon.foresight.calibration_file import load, save
from echelon.foresight.play.device import Device
from echelon.pipeline import Pipeline

sys.path.extend([str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "examples")])
from gpt import loss_of, make_gpt
from harness import options_of, print_environment, print_head, print_row
from slow_link import Unavailable, run_ranks, slow_link

WARM_UP, STEPS, RUNS = 5, 20, 5
BACKENDS = {"shared-memory": "shm", "loopback": "tcp"}
SLOW = "1 Gbit/s, 1 ms"
"""Link between two namespaces, as between two hosts."""
MICROBATCHES = 4

Step = Callable[[], object]


class Workload(NamedTuple):
    """A model, and a batch for each rank of data parallelism."""

    make: Callable[[], nn.Sequential]
    inputs: Callable[[], torch.Tensor]
    target: Callable[[], torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def mlp(width: int, depth: int, samples: int) -> Workload:
    def make() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))

    def batch() -> torch.Tensor:
        return torch.ones(samples, width)

    return Workload(make, batch, batch, F.mse_loss)


def gpt(width: int, layers: int, context: int, samples: int) -> Workload:
    def words() -> torch.Tensor:
        return torch.ones(samples, context, dtype=torch.int64)

    return Workload(
        lambda: make_gpt(num_layers=layers, width=width, num_heads=4, context=context), words, words, loss_of
    )


WORKLOADS = {
    "MLP 512 x 8": mlp(512, 8, 64),
    "MLP 1024 x 4": mlp(1024, 4, 128),
    "GPT 128 x 4": gpt(128, 4, 64, 8),
    "GPT 256 x 4": gpt(256, 4, 128, 4),
}


def training(model: nn.Module, work: Workload) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, target = work.inputs(), work.target()

    def step() -> None:
        optimizer.zero_grad()
        work.loss(model(inputs), target).backward()
        optimizer.step()

    return step


def ddp(work: Workload) -> Step:
    return training(nn.parallel.DistributedDataParallel(work.make(), bucket_cap_mb=1), work)


def fsdp(work: Workload) -> Step:
    model, mesh = work.make(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return training(fully_shard(model, mesh=mesh), work)


def tensor_parallel(work: Workload) -> Step:
    """Linear layers of the MLP in pairs, those of the GPT's feed-forward part."""
    model, mesh = work.make(), init_device_mesh("cpu", (dist.get_world_size(),))
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if named := [name for name in linear if "feed_forward" in name]:
        plan = {name: ColwiseParallel() if name.endswith("in") else RowwiseParallel() for name in named}
    else:
        plan = {name: (ColwiseParallel(), RowwiseParallel())[index % 2] for index, name in enumerate(linear)}
    return training(parallelize_module(model, mesh, plan), work)


def torch_pipeline(schedule: type[Schedule1F1B | ScheduleGPipe]) -> Callable[[Workload], Step]:
    def make(work: Workload) -> Step:
        rank, size = dist.get_rank(), dist.get_world_size()
        layers = list(work.make())
        share = len(layers) // size
        part = nn.Sequential(*layers[rank * share : (rank + 1) * share if rank < size - 1 else None])
        stage = PipelineStage(part, rank, size, torch.device("cpu"))
        run = schedule(stage, MICROBATCHES, loss_fn=work.loss)
        optimizer = torch.optim.AdamW(part.parameters(), lr=1e-4)
        inputs = (work.inputs(),) if rank == 0 else ()
        target = {"target": work.target()} if rank == size - 1 else {}

        def step() -> None:
            optimizer.zero_grad()
            run.step(*inputs, **target)
            optimizer.step()

        return step

    return make


def own_ddp(work: Workload) -> Step:
    return training(echelon.DDP(work.make(), group=echelon.init()), work)


def own_pipeline(schedule: str) -> Callable[[Workload], Step]:
    def make(work: Workload) -> Step:
        pipe = Pipeline(
            work.make(), group=echelon.init(), schedule=schedule, num_microbatches=MICROBATCHES, loss_fn=work.loss
        )
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
        inputs, target = work.inputs(), work.target()

        def step() -> None:
            optimizer.zero_grad()
            pipe.step(inputs, target=target)
            optimizer.step()

        return step

    return make


WAYS: dict[str, Callable[[Workload], Step]] = {
    "DDP": ddp,
    "FSDP2": fsdp,
    "TP": tensor_parallel,
    "torch GPipe": torch_pipeline(ScheduleGPipe),
    "torch 1F1B": torch_pipeline(Schedule1F1B),
    "Echelon DDP": own_ddp,
    "Echelon 1f1b": own_pipeline("1f1b"),
    "Echelon zb-h1": own_pipeline("zb-h1"),
}


class Row(NamedTuple):
    way: str
    workload: str
    ranks: int
    network: str


MLP, WIDE, GPT, LARGE = WORKLOADS
ROWS = (
    *(Row("DDP", workload, 1, "shared-memory") for workload in WORKLOADS),
    *(Row(way, workload, 2, network) for network in BACKENDS for way in ("DDP", "FSDP2") for workload in (WIDE, GPT)),
    Row("DDP", MLP, 4, "shared-memory"),
    Row("DDP", LARGE, 4, "loopback"),
    Row("FSDP2", MLP, 4, "shared-memory"),
    Row("FSDP2", LARGE, 4, "loopback"),
    Row("DDP", GPT, 8, "shared-memory"),
    Row("TP", MLP, 2, "shared-memory"),
    Row("TP", LARGE, 2, "shared-memory"),
    Row("TP", WIDE, 2, "loopback"),
    Row("torch GPipe", WIDE, 2, "shared-memory"),
    Row("torch 1F1B", LARGE, 2, "shared-memory"),
    Row("torch 1F1B", MLP, 4, "loopback"),
    Row("Echelon DDP", WIDE, 2, "shared-memory"),
    Row("Echelon DDP", GPT, 4, "loopback"),
    Row("Echelon 1f1b", WIDE, 2, "shared-memory"),
    Row("Echelon 1f1b", LARGE, 2, "loopback"),
    Row("Echelon 1f1b", MLP, 4, "shared-memory"),
    Row("Echelon zb-h1", WIDE, 2, "shared-memory"),
    Row("Echelon zb-h1", LARGE, 4, "shared-memory"),
    Row("DDP", GPT, 2, SLOW),
    Row("FSDP2", GPT, 2, SLOW),
    Row("Echelon DDP", GPT, 2, SLOW),
    Row("Echelon 1f1b", LARGE, 2, SLOW),
)


def main(way: str, workload: str, num_steps: int) -> list[float]:
    """Returns the seconds of each step."""
    torch.set_num_threads(1)
    is_own = way.startswith("Echelon")
    if not is_own:
        dist.init_process_group("echelon")
    step = WAYS[way](WORKLOADS[workload])
    times = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    if not is_own:
        dist.destroy_process_group()
    return times


def measured(row: Row) -> float:
    """Returns the median seconds of a step on real processes, of the slowest rank.

    Raises:
        Unavailable: this machine has no slow link.
    """
    args = (row.way, row.workload, WARM_UP + STEPS)
    if row.network == SLOW:
        with slow_link(bits_per_second=1e9, delay=1e-3) as ends:
            outputs = run_ranks(ends, [sys.executable, __file__, "--rank", row.way, row.workload])
        return max(statistics.median(json.loads(text.splitlines()[-1])[WARM_UP:]) for text in outputs)
    ranks = echelon.spawn(main, row.ranks, args, backend=BACKENDS[row.network])
    return max(statistics.median(times[WARM_UP:]) for times in ranks)


def foreseen(row: Row, device: Device) -> float:
    """Returns the foreseen seconds of a step."""
    args = row.way, row.workload, WARM_UP + 50
    if row.network == SLOW:
        network = Network(latency=1e-3, bandwidth=125e6)
        return echelon.foresee(main, row.ranks, args, gpu=device, network=network, hosts=2).step_seconds
    return echelon.foresee(main, row.ranks, args, gpu=device, network=row.network).step_seconds


def compare(device: Device, rows: Sequence[Row], rounds: int) -> None:
    """Prints the rows."""
    print_environment(f"one thread a rank, medians of {rounds} runs in turns")
    print_head("way | workload | ranks | network | measured (ms) | middle half | foreseen (ms) | foreseen / measured")
    runs: dict[Row, list[float]] = {row: [] for row in rows}
    for number in range(rounds):
        for row in rows:
            try:
                runs[row].append(measured(row))
            except Unavailable as error:
                print(f"{row}: {error}", file=sys.stderr)
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    errors = []
    for row in filter(runs.__getitem__, rows):
        low, middle, high = statistics.quantiles(runs[row], n=4)
        ratio = foreseen(row, device) / middle
        spread = (high - low) / middle
        if spread <= 0.05:
            errors.append(abs(ratio - 1))
        counted = "" if spread <= 0.05 else " (not counted)"
        figures = f"{middle * 1e3:.1f}", f"{spread:.1%}{counted}", f"{middle * ratio * 1e3:.1f}", f"{ratio:.2f}"
        print_row(*row, *figures)
    if errors:
        print(f"\n{len(errors)} counted: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__" and sys.argv[1:2] == ["--rank"]:
    print(json.dumps(main(*sys.argv[2:], WARM_UP + STEPS)))
elif __name__ == "__main__":
    parser = options_of(__doc__, rounds=RUNS)
    parser.add_argument("words", nargs="*", help="parts of the names of ways and workloads; all rows if none is given")
    parser.add_argument("--device", type=Path, help="file of an earlier calibration; written if it is not there")
    options = parser.parse_args()
    chosen = [row for row in ROWS if all(word.lower() in " ".join(map(str, row)).lower() for word in options.words)]
    if not chosen:
        parser.error(f"no row has {' and '.join(options.words)}")
    own = load(options.device) if options.device and options.device.exists() else calibrate()
    if options.device and not options.device.exists():
        save(own, options.device)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    compare(own, chosen, options.rounds)
