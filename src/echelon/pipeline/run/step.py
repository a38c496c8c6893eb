"""Batch of a step, and the exchange of its results: loss, metrics and times on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch

from echelon.arguments import no_attribute
from echelon.backends.memory import dtype_code, dtype_of
from echelon.errors import InvalidArgument, SizeMismatch
from echelon.group.group import JsonLike, ProcessGroup
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.run.loss import Activations, LossScale, Metrics, Number
from echelon.pipeline.run.samples import Evidence, check_same_batch
from echelon.pipeline.stage.nested import Value
from echelon.pipeline.stage.replay import Key


@dataclass
class Batch:
    """Batch of one step, cut into microbatches, with its results."""

    inputs: Sequence[tuple[Value, ...]] | None
    """Positional arguments of the first stage, by microbatch; None on other ranks."""
    targets: Sequence[Value] | None
    """Targets by microbatch; None on ranks without the last stage."""
    kwargs: Sequence[Mapping[str, Value]]
    """Keyword arguments of all stages of this rank, by microbatch."""
    loss_fn: Callable[[Value, Value], torch.Tensor] | None
    scale: LossScale | None
    keeps_outputs: bool = False
    num_inputs: int = 0
    """Samples in `inputs`."""
    num_targets: int = 0
    """Samples in `targets`."""
    num_kwargs: int = 0
    """Samples in `kwargs`."""
    evidence: Evidence | None = None
    """Excerpt of the batch in training, which shows whether all ranks got the same."""
    stepped: int = 0
    """Code for the steps of this rank's optimizers before it; see `UnevenSteps`."""
    key: Key = field(default_factory=Key)
    """Key of the random numbers."""
    metrics: Metrics | None = None
    grad_outputs: Sequence[Sequence[torch.Tensor | None]] = ()
    """Without a loss_fn: by microbatch, the gradients of the output's tensors that require one."""
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    """Losses by microbatch, before scaling."""
    outputs: dict[int, Value] = field(default_factory=dict)
    measured: dict[int, dict[str, Number]] = field(default_factory=dict)
    """Metrics by microbatch, before scaling."""


_MEANT = {
    "backward": " step() has run the backward already: call optimizer.step() next",
    **{name: f" its loss has: write step(...).loss.{name}()" for name in ("item", "detach", "cpu")},
}
Span = tuple[float, float]
"""Begin and end of a step of the schedule, in seconds."""


@dataclass(frozen=True)
class StepOutput:
    """Results of one training step.

    loss: of the whole batch, data-parallel ranks included; zero-dim, on every rank. It has no graph: the step has run
    the backward. outputs: outputs of the last stage in batch order, on its rank and only on request; else None.
    metrics: of the whole batch like the loss, on every rank, if the Pipeline has a metrics function; else None.
    """

    loss: torch.Tensor
    outputs: Value = None
    metrics: dict[str, float] | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute("the result of step()", name, ("loss", "outputs", "metrics"), _MEANT)

        def _refuse(self, *_: object) -> NoReturn:
            raise InvalidArgument("the result of step() is not the loss itself: write step(...).loss")

        __float__ = __iter__ = __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = _refuse

        def __format__(self, form: str) -> str:
            return self._refuse() if form else str(self)


class Told(NamedTuple):
    """Results of a step that every rank has."""

    loss: torch.Tensor
    times: list[list[Span]]
    """Begin and end of each step, by rank."""
    activations: list[Activations]
    """Activations of each stage."""
    stepped: list[int]
    """Code for the steps of each rank's optimizers before the step."""


_HEAD = 9
"""Number of values that each rank sends first."""
_OF_STAGE = 3
"""Number of values that it then sends for each of its stages, before its times."""


def tell(
    group: ProcessGroup,
    schedule: Schedule,
    times: Sequence[Span],
    batch: Batch,
    loss: torch.Tensor | None,
    activations: Sequence[Activations],
) -> Told:
    """Exchanges loss, times and memory, so that every rank has the results of all ranks. Waits for all ranks.

    Args:
        group: the ranks of the pipeline.
        schedule: the schedule that they ran.
        times: begin and end of each step of this rank.
        batch: this rank's batch.
        loss: loss of the batch on the rank of the last stage; else None.
        activations: those of this rank's stages.

    Raises:
        SizeMismatch: on every rank: the target or the keyword arguments have another number of samples than the inputs.
        CollectiveMismatch: on every rank: the ranks got different samples.
    """
    # One all_gather for all of it. float64 holds every loss, and the counts up to 2^53, exactly. The number
    # of each rank's times is in the schedule.
    code, value = (0, 0.0) if loss is None else (dtype_code(loss.dtype), loss.item())
    assert batch.evidence is not None
    head = [
        batch.num_inputs,
        batch.num_targets,
        batch.num_kwargs,
        code,
        value,
        *batch.evidence.numbers(),
        batch.stepped,
    ]
    sizes = chain.from_iterable(
        (each.activation, each.weight_activation, each.recomputed_activation) for each in activations
    )
    numbers = group.all_gather(
        torch.tensor([*head, *sizes, *chain.from_iterable(times)], dtype=torch.float64, device="cpu")
    ).tolist()
    rows, begin, all_times, held = [], 0, [], [Activations()] * schedule.num_stages
    for rank, order in enumerate(schedule.orders):
        rows.append(numbers[begin : begin + _HEAD])
        begin += _HEAD
        for stage in (stage for stage, its_rank in enumerate(schedule.placement) if its_rank == rank):
            held[stage] = Activations(*map(int, numbers[begin : begin + _OF_STAGE]))
            begin += _OF_STAGE
        end = begin + 2 * len(order)
        all_times.append(list(zip(numbers[begin:end:2], numbers[begin + 1 : end : 2], strict=True)))
        begin = end
    # Compared here, on every rank, since a rank alone sees only its own part of the batch.
    first, last = (rows[schedule.placement[stage]] for stage in (0, -1))
    _compare("target of step()", int(first[0]), int(last[1]))
    for row in rows:
        if row[2]:  # 0: no keyword arguments on this rank
            _compare("keyword arguments of step()", int(first[0]), int(row[2]))
    check_same_batch([row[5:8] for row in rows], schedule.placement[0], schedule.placement[-1], group)
    loss = torch.tensor(last[4], dtype=dtype_of(int(last[3])), device="cpu")
    return Told(loss, all_times, held, [int(row[8]) for row in rows])


def _compare(what: str, samples: int, got: int) -> None:
    if got != samples:
        raise SizeMismatch(f"{samples} samples, as the inputs", got, what, "pass tensors with one row per sample")


def tell_metrics(group: ProcessGroup, data_parallel: ProcessGroup | None, last: int, batch: Batch) -> dict[str, float]:
    """Returns the metrics of the whole batch on every rank. Waits for the rank of the last stage.

    Args:
        group: the ranks of the pipeline.
        data_parallel: the ranks that have the other parts of the batch.
        last: the rank of the last stage, where the metrics are.
        batch: this rank's batch.
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
            data_parallel.all_reduce(total)  # a sum: factors are shares of the batch of all replicas
        mine = dict(zip(names, total.tolist(), strict=True))
    told = group.broadcast_object(mine, src=last)
    assert isinstance(told, dict)
    return {name: float(value) for name, value in told.items() if isinstance(value, float)}
