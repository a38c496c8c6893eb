"""The steps whose time is predicted: of a small GPT, as data parallelism and as a pipeline of two ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

import echelon
from echelon import ProcessGroup
from echelon.pipeline import Pipeline

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import loss_of, make_gpt

WARM_UP, STEPS = 2, 6
CONTEXT, SAMPLES, WIDTH, MICROBATCHES = 64, 8, 128, 4
BUCKET = 1 << 20
"""Bytes that data parallelism reduces at once."""
ACTIVATIONS = SAMPLES // MICROBATCHES * CONTEXT * WIDTH * 4
"""Bytes that a stage of the pipeline sends at once."""


def timed(group: ProcessGroup, step: Callable[[], object], count: int = WARM_UP + STEPS) -> list[float]:
    """Returns how long each step took but the first, one upon the other as in training, on the clock of the group.

    That clock is virtual on simulated ranks. No barrier stands between steps: over a slow link one rank would leave it
    later than the other, and begin its step so much nearer to the other's first message.
    """
    group.barrier()
    times = [group.backend.now()]
    for _ in range(count):
        step()
        times.append(group.backend.now())
    return [end - start for start, end in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False)]


def computing(group: ProcessGroup) -> Callable[[], None]:
    """Returns what a rank computes in a step of data parallelism, without its communication."""
    torch.set_num_threads(1)
    inputs, target = _batch(group)
    alone = _model()
    return lambda: loss_of(alone(inputs), target).backward()


def local_steps(group: ProcessGroup) -> list[float]:
    return timed(group, computing(group))


def ddp_steps(group: ProcessGroup) -> list[float]:
    torch.set_num_threads(1)
    inputs, target = _batch(group)
    ddp = echelon.DDP(_model(), group, bucket_mb=BUCKET / 2**20)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(ddp(inputs), target).backward()
        optimizer.step()

    return timed(group, step)


def pipeline_steps(group: ProcessGroup) -> list[float]:
    torch.set_num_threads(1)
    inputs, target = _batch(group)
    pipe = Pipeline(_model(), group, "1f1b", MICROBATCHES, loss_of)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        pipe.step(inputs, target=target)
        optimizer.step()

    return timed(group, step)


def _model() -> torch.nn.Sequential:
    return make_gpt(num_layers=4, width=WIDTH, num_heads=4, context=CONTEXT)


def _batch(group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(group.rank)
    text = torch.randint(256, (SAMPLES, CONTEXT + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
