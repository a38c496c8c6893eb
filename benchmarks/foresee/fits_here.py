"""Does a program run in the memory that was foreseen for it, and not in less?

    python benchmarks/foresee/fits_here.py            # all programs
    python benchmarks/foresee/fits_here.py fsdp head  # some of them

Each rank is a process in a cgroup of its own. Its limit is the foreseen memory of tensors and that of the process,
which a run of the same program with tiny tensors measures, times 1.05 and then times 0.90.

glibc keeps the memory of freed tensors up to 32 MiB in its heap, which then has holes. So here it maps every tensor of
1 MiB or more by itself. With --heap it does as it likes.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from limits import NoLimits, group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils.checkpoint import checkpoint

import echelon
import echelon.interop.torch_distributed
from echelon.pipeline import Pipeline

sys.path.append(str(Path(__file__).parents[1]))
from harness import options_of, print_environment, print_head, print_row

STEPS = 2
SECONDS = 600
"""Most time of a run. It takes 10 to 40 s where nothing else runs."""
ABOVE, BELOW = 1.05, 0.90
KILLED = "killed"
MIB = 1 << 20
MAPPED = {"MALLOC_MMAP_THRESHOLD_": str(MIB)}

Step = Callable[[], object]
MakeOptimizer = Callable[..., Optimizer]


# Models


class Work(NamedTuple):
    """A model, and a batch of each rank."""

    model: nn.Sequential
    inputs: torch.Tensor
    target: torch.Tensor
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def wide(is_tiny: bool) -> Work:
    """Four layers of 64 MiB on few samples: the state of training."""
    width = 32 if is_tiny else 4096
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)))
    return Work(model, torch.ones(32, width), torch.zeros(32, width), F.mse_loss)


def tall(is_tiny: bool) -> Work:
    """Six small layers on many samples: tensors of 40 MiB that backward needs."""
    samples, width = 64 if is_tiny else 40960, 256
    layers = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(6))
    return Work(nn.Sequential(*layers), torch.ones(samples, width), torch.zeros(samples, width), F.mse_loss)


def head(is_tiny: bool) -> Work:
    """A small model with 65,536 tokens in its vocabulary: scores of 128 MiB, and a sparse read of as much."""
    vocabulary, width = 64 if is_tiny else 65536, 512
    words = torch.ones(512, dtype=torch.int64)
    embedding, layer = nn.Embedding(vocabulary, width), nn.Sequential(nn.Linear(width, width), nn.GELU())
    return Work(nn.Sequential(embedding, layer, nn.Linear(width, vocabulary)), words, words, F.cross_entropy)


MODELS = {"wide": wide, "tall": tall, "head": head}


# Programs


class Recomputed(nn.Module):
    """A layer whose forward is repeated in backward."""

    def __init__(self, layer: nn.Module, is_reentrant: bool) -> None:
        super().__init__()
        self.layer, self.is_reentrant = layer, is_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.is_reentrant)


def recomputed(work: Work, is_reentrant: bool = False) -> Work:
    """Returns the work with checkpointing of every layer but the first."""
    first, *others = work.model
    return work._replace(model=nn.Sequential(first, *(Recomputed(layer, is_reentrant) for layer in others)))


def training(work: Work, make: MakeOptimizer = AdamW, microbatches: int = 1, dtype: torch.dtype | None = None) -> Step:
    """Returns a step of training."""
    optimizer = make(work.model.parameters())
    parts = list(zip(work.inputs.chunk(microbatches), work.target.chunk(microbatches), strict=True))

    def step() -> None:
        for inputs, target in parts:
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = work.loss(work.model(inputs), target)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(work: Work, is_view: bool = False) -> Step:
    return training(work._replace(model=DistributedDataParallel(work.model, gradient_as_bucket_view=is_view)))


def fsdp(work: Work, policy: MixedPrecisionPolicy | None = None, reshards: bool = True) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in work.model:
        fully_shard(layer, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy(), reshard_after_forward=reshards)
    return training(work._replace(model=fully_shard(work.model, mesh=mesh)))


def tensor_parallel(work: Work) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    linear = [name for name, module in work.model.named_modules() if isinstance(module, nn.Linear)]
    plan = {name: (ColwiseParallel(), RowwiseParallel())[index % 2] for index, name in enumerate(linear)}
    return training(work._replace(model=parallelize_module(work.model, mesh, plan)))


def torch_pipeline(work: Work) -> Step:
    rank, size = dist.get_rank(), dist.get_world_size()
    share = len(work.model) // size
    part = work.model[rank * share : (rank + 1) * share]
    schedule = Schedule1F1B(PipelineStage(part, rank, size, torch.device("cpu")), 4, loss_fn=work.loss)
    optimizer = AdamW(part.parameters())

    def step() -> None:
        is_last = rank == size - 1
        schedule.step(*(() if rank else (work.inputs,)), **({"target": work.target} if is_last else {}))
        optimizer.step()
        optimizer.zero_grad()

    return step


def own_ddp(work: Work) -> Step:
    return training(work._replace(model=echelon.DDP(work.model, group=echelon.init())))


def own_pipeline(work: Work) -> Step:
    pipe = Pipeline(work.model, group=echelon.init(), schedule="1f1b", num_microbatches=4, loss_fn=work.loss)
    optimizer = AdamW(pipe.parameters())

    def step() -> None:
        pipe.step(work.inputs, target=work.target)
        optimizer.step()
        optimizer.zero_grad()

    return step


BFLOAT16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
PROGRAMS: dict[str, Callable[[Work], Step]] = {
    "SGD": partial(training, make=partial(SGD, lr=1e-3)),
    "momentum": partial(training, make=partial(SGD, lr=1e-3, momentum=0.9)),
    "Adam": partial(training, make=Adam),
    "AdamW": training,
    "AdamW, foreach": partial(training, make=partial(AdamW, foreach=True)),
    "AdamW, fused": partial(training, make=partial(AdamW, fused=True)),
    "RMSprop": partial(training, make=RMSprop),
    "4 microbatches": partial(training, microbatches=4),
    "bfloat16": partial(training, dtype=torch.bfloat16),
    "checkpointing": lambda work: training(recomputed(work)),
    "checkpointing, reentrant": lambda work: training(recomputed(work, is_reentrant=True)),
    "DDP": ddp,
    "DDP, views": partial(ddp, is_view=True),
    "DDP, checkpointing": lambda work: ddp(recomputed(work)),
    "FSDP2": fsdp,
    "FSDP2, ZeRO-2": partial(fsdp, reshards=False),
    "FSDP2, bfloat16": partial(fsdp, policy=BFLOAT16),
    "FSDP2, checkpointing": lambda work: fsdp(recomputed(work)),
    "TP": tensor_parallel,
    "torch 1F1B": torch_pipeline,
    "Echelon DDP": own_ddp,
    "Echelon 1f1b": own_pipeline,
}


class Row(NamedTuple):
    program: str
    model: str
    ranks: int


ROWS = (
    Row("SGD", "wide", 1),
    Row("SGD", "tall", 1),
    Row("momentum", "head", 1),
    Row("Adam", "wide", 1),
    Row("AdamW", "head", 1),
    Row("AdamW, foreach", "wide", 1),
    Row("AdamW, fused", "wide", 1),
    Row("RMSprop", "wide", 1),
    Row("4 microbatches", "tall", 1),
    Row("bfloat16", "tall", 1),
    Row("checkpointing", "tall", 1),
    Row("checkpointing, reentrant", "tall", 1),
    Row("DDP", "wide", 2),
    Row("DDP, views", "wide", 2),
    Row("DDP, checkpointing", "tall", 2),
    Row("FSDP2", "wide", 2),
    Row("FSDP2, ZeRO-2", "wide", 2),
    Row("FSDP2, bfloat16", "wide", 2),
    Row("FSDP2, checkpointing", "tall", 2),
    Row("TP", "wide", 2),
    Row("torch 1F1B", "tall", 2),
    Row("Echelon DDP", "wide", 2),
    Row("Echelon 1f1b", "tall", 2),
)


def main(program: str, model: str, is_tiny: bool) -> None:
    """Trains: the program that is foreseen, and that runs under a limit."""
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not program.startswith("Echelon"):
        dist.init_process_group("echelon")
    step = PROGRAMS[program](MODELS[model](is_tiny))
    for _ in range(STEPS):
        step()


# Runs


class Run(NamedTuple):
    """Outcome of a run."""

    failure: str
    """Reason why it has not ended well. Empty if it has."""
    peaks: tuple[int, ...]
    """Most bytes of each rank's process."""


def run(row: Row, environ: Mapping[str, str], limits: Sequence[int] | None = None) -> Run:
    """Runs a program, each rank under its limit. Without limits its tensors are tiny."""
    with ExitStack() as stack:
        groups = [stack.enter_context(group(str(rank))) for rank in range(row.ranks)]
        for each, limit in zip(groups, limits or (), strict=False):
            each.limit(limit)
        command = [sys.executable, __file__, "--run", row.program, row.model, *["--tiny"] * (limits is None)]
        places = {**environ, "WORLD_SIZE": str(row.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
        ranks = [{**places, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(row.ranks)]
        processes = [each.start(command, rank) for each, rank in zip(groups, ranks, strict=True)]
        try:
            failure = _failure(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return Run(failure, tuple(each.peak for each in groups))


def _failure(processes: Sequence[subprocess.Popen[str]]) -> str:
    """Returns why a rank has failed, as soon as one has. Empty if all have ended well."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if -signal.SIGKILL in codes:
            return KILLED
        if any(codes):
            return f"ended with {codes}"
        if None not in codes:
            return ""
        time.sleep(0.1)
    return f"no end in {SECONDS} s"


def _free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def compare(rows: Sequence[Row], environ: Mapping[str, str] = MAPPED) -> None:
    """Prints the rows."""
    print_environment(
        "MiB of the rank with the most. Limits of each rank: 1.05 and 0.90 of tensors and process together"
    )
    print_head("program | model | ranks | tensors, foreseen | process | together | measured | off | at 1.05 | at 0.90")
    held = 0
    for row in rows:
        before = run(row, environ)
        if before.failure:
            raise SystemExit(f"{row} with tiny tensors: {before.failure}")
        args = row.program, row.model, False
        tensors = echelon.foresee(main, row.ranks, args, gpu="cpu", network="shared-memory").live_memory
        foreseen = [sum(each) for each in zip(tensors, before.peaks, strict=True)]
        above, below = (run(row, environ, [int(share * each) for each in foreseen]) for share in (ABOVE, BELOW))
        held += not above.failure and below.failure == KILLED
        most = max(range(row.ranks), key=foreseen.__getitem__)
        figures = tensors[most], before.peaks[most], foreseen[most], above.peaks[most]
        off = f"{above.peaks[most] / foreseen[most] - 1:+.1%}"
        print_row(
            *row, *(f"{each / MIB:.0f}" for each in figures), off, above.failure or "runs", below.failure or "runs"
        )
    print(f"\n{held} of {len(rows)} run with 5 % more, and die with 10 % less")


if __name__ == "__main__":
    parser = options_of(__doc__)
    parser.add_argument("words", nargs="*", help="parts of the names of programs and models; all rows if none is given")
    parser.add_argument("--heap", action="store_true", help="leave glibc's heap as it is")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        main(*options.run, options.tiny)
        raise SystemExit
    chosen = [row for row in ROWS if all(word.lower() in " ".join(map(str, row)).lower() for word in options.words)]
    if not chosen:
        parser.error(f"no row has {' and '.join(options.words)}")
    try:
        compare(chosen, {} if options.heap else MAPPED)
    except NoLimits as error:
        print(f"skipped: {error}")
