"""What a step gave, told to every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch

from echelon.backends.memory import dtype_code, dtype_of
from echelon.errors import SizeMismatch
from echelon.group.group import JsonLike, ProcessGroup
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.run.loss import LossScale, Metrics, Number
from echelon.pipeline.stage.nested import Value
from echelon.pipeline.stage.replay import Key

# What one step works on, and what comes of it.


@dataclass
class Batch:
    """What one step works on, cut into microbatches, and what comes of it."""

    inputs: Sequence[tuple[Value, ...]] | None
    """For each microbatch the positional arguments of the first stage, where that is."""
    targets: Sequence[Value] | None
    """For each microbatch the target, where the last stage is."""
    kwargs: Sequence[Mapping[str, Value]]
    """For each microbatch the keyword arguments of all stages of this rank."""
    loss_fn: Callable[[Value, Value], torch.Tensor] | None
    scale: LossScale | None
    keeps_outputs: bool = False
    num_inputs: int = 0
    """Samples in `inputs`."""
    num_targets: int = 0
    """Samples in `targets`."""
    num_kwargs: int = 0
    """Samples in `kwargs`."""
    key: Key = field(default_factory=Key)
    """Of the random numbers."""
    metrics: Metrics | None = None
    grad_outputs: Sequence[Sequence[torch.Tensor | None]] = ()
    """Without a loss_fn, for each microbatch the gradients of the tensors of the output that require one."""
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    """For each microbatch its loss, not scaled yet."""
    outputs: dict[int, Value] = field(default_factory=dict)
    measured: dict[int, dict[str, Number]] = field(default_factory=dict)
    """What `metrics` gave."""


Span = tuple[float, float]
"""When a step began and ended."""


@dataclass(frozen=True)
class StepOutput:
    """What one training step gave.

    loss: over the whole batch, data-parallel ranks included; zero-dim, on every rank. It has no graph: the step has run
    the backward. outputs: the last stage's, in batch order, on its rank and only if asked for; else None. metrics: over
    the whole batch as the loss, on every rank, if the Pipeline has a function for them.
    """

    loss: torch.Tensor
    outputs: Value = None
    metrics: dict[str, float] | None = None


class Told(NamedTuple):
    """What every rank knows after a step."""

    loss: torch.Tensor
    times: list[list[Span]]
    """For each rank, when each of its steps began and ended."""


_HEAD = 5
"""How many numbers each rank says before its times."""


def tell(
    group: ProcessGroup, schedule: Schedule, times: Sequence[Span], batch: Batch, loss: torch.Tensor | None
) -> Told:
    """Gives every rank the loss, and when each step of every rank ran.

    Args:
        group: the ranks of the pipeline.
        schedule: what they ran.
        times: when each step of this rank began and ended.
        batch: what this rank worked on.
        loss: that of the batch, where the last stage is; else None.

    Raises:
        SizeMismatch: on every rank, if the target or the keyword arguments had another number of samples than the
            inputs.
    """
    code, value = (0, 0.0) if loss is None else (dtype_code(loss.dtype), loss.item())
    head = [batch.num_inputs, batch.num_targets, batch.num_kwargs, code, value]
    numbers = group.all_gather(
        torch.tensor([*head, *chain.from_iterable(times)], dtype=torch.float64, device="cpu")
    ).tolist()
    rows, begin = [], 0
    for order in schedule.orders:
        rows.append(numbers[begin : begin + _HEAD + 2 * len(order)])
        begin += len(rows[-1])
    first, last = (rows[schedule.placement[stage]] for stage in (0, -1))
    _compare("target of step()", int(first[0]), int(last[1]))
    for row in rows:
        if row[2]:
            _compare("keyword arguments of step()", int(first[0]), int(row[2]))
    all_times = [list(zip(row[_HEAD::2], row[_HEAD + 1 :: 2], strict=True)) for row in rows]
    return Told(torch.tensor(last[4], dtype=dtype_of(int(last[3])), device="cpu"), all_times)


def _compare(what: str, samples: int, got: int) -> None:
    if got != samples:
        raise SizeMismatch(f"{samples} samples, as the inputs", got, what, "pass tensors with one row per sample")


def tell_metrics(group: ProcessGroup, data_parallel: ProcessGroup | None, last: int, batch: Batch) -> dict[str, float]:
    """Gives every rank the metrics of the whole batch.

    Args:
        group: the ranks of the pipeline.
        data_parallel: the ranks that have the other parts of the batch.
        last: the rank of the last stage, which has them.
        batch: what this rank worked on.
    """
    mine: dict[str, JsonLike] = {}
    if batch.measured:
        assert batch.scale is not None
        names = list(batch.measured[0])
        total = torch.zeros(len(names), dtype=torch.float64, device="cpu")
        for microbatch, found in batch.measured.items():
            if batch.scale.counts(microbatch):
                numbers = torch.tensor([float(number) for number in found.values()], dtype=torch.float64, device="cpu")
                total += numbers * batch.scale.factor(microbatch)
        if data_parallel is not None:
            data_parallel.all_reduce(total)
        mine = dict(zip(names, total.tolist(), strict=True))
    told = group.broadcast_object(mine, src=last)
    assert isinstance(told, dict)
    return {name: float(value) for name, value in told.items() if isinstance(value, float)}
