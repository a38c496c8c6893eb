"""How the losses of microbatches make the loss of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import torch

from echelon.backends.admission import check_values
from echelon.backends.work import Work
from echelon.errors import NotFinite, SizeMismatch
from echelon.group.group import ProcessGroup
from echelon.pipeline.plan.action import Action
from echelon.pipeline.plan.cost import Costs
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.plan.simulate import peaks
from echelon.pipeline.run.microbatch import batch_size
from echelon.pipeline.stage.nested import Value, tensors_of
from echelon.pipeline.stage.stage import Stage

# Measures what one rank holds between forwards and backwards, as the plan counts it.


class Memory(NamedTuple):
    """The most bytes that this rank held of activations: saved for backward, and gradients that wait for a W."""

    planned: int
    """What the schedule's peak comes to, with what the activations of this rank's stages were measured to be."""
    measured: int
    """What was counted after each action."""


@dataclass
class Activations:
    """The bytes of one stage's activations for one microbatch; of the largest, where they differ."""

    activation: int = 0
    """From forward to the end of the backward, or to the end of I."""
    weight_activation: int = 0
    """From the end of I to the end of W."""
    recomputed_activation: int = 0
    """What running the forward again adds."""


@dataclass
class Meter:
    """Counts bytes, action by action, in one run.

    Args:
        stages: this rank's, by their index; they are metered.
        but: addresses of memory that does not count: parameters, buffers, and what belongs to the user.
    """

    stages: Mapping[int, Stage]
    but: Collection[int]
    peak: int = 0
    of_stage: dict[int, Activations] = field(default_factory=dict)
    _held: dict[tuple[int, int], int] = field(default_factory=dict)

    def ran(self, action: Action) -> None:
        """Looks at what an action left."""
        stage, kind, microbatch = action
        found = self.of_stage.setdefault(stage, Activations())
        size = self._look(stage, microbatch)
        if kind == "F":
            found.activation = max(found.activation, size)
        elif kind == "I":
            found.weight_activation = max(found.weight_activation, size)

    def recomputed(self, stage: int, microbatch: int) -> None:
        """Looks at what a forward that was run again left."""
        before = self._held[stage, microbatch]
        found = self.of_stage[stage]
        found.recomputed_activation = max(found.recomputed_activation, self._look(stage, microbatch) - before)

    def memory(self, schedule: Schedule, rank: int) -> Memory:
        """Returns the peak, and what the schedule says it should be."""
        sizes = [self.of_stage.get(stage, Activations()) for stage in range(schedule.num_stages)]
        costs = Costs(
            activation=[size.activation for size in sizes],
            weight_activation=[size.weight_activation for size in sizes],
            recomputed_activation=[max(0, size.recomputed_activation) for size in sizes],
        )
        planned = peaks(schedule, costs.per_stage(schedule.placement))[rank]
        return Memory(int(planned), self.peak)

    def _look(self, stage: int, microbatch: int) -> int:
        self._held[stage, microbatch] = size = self.stages[stage].num_bytes(microbatch, self.but)
        self.peak = max(self.peak, sum(self._held.values()))
        return size


Reduction = Literal["mean", "sum"]
Metrics: TypeAlias = Callable[[Value, Value], Mapping[str, torch.Tensor | float]]
"""metrics(output, target): numbers by name."""
Number: TypeAlias = torch.Tensor | float
"""One number; a tensor of one element while it has not been read."""


class Objective(NamedTuple):
    """What is trained for."""

    loss_fn: Callable[[Value, Value], torch.Tensor] | None
    reduction: Reduction
    weigh: Callable[[Value], float] | None
    """weigh(target): what a microbatch counts in the mean; None: its samples."""
    metrics: Metrics | None

    def scale(self, targets: Sequence[Value], data_parallel: ProcessGroup | None) -> LossScale:
        """Returns how much each of some microbatches counts."""
        return LossScale(targets, self.reduction, self.weigh, data_parallel)


class LossScale:
    """Scales every microbatch's loss so that what is added up is the loss, and the gradient, of the whole batch.

    With "mean" microbatch i counts w_i / W, where w_i is its number of samples (or `weigh(target)`) and W the sum over
    the whole batch, data-parallel ranks included; with "sum" it counts 1. The loss of one that counts 0 is not asked
    for: a mean over nothing is no number. Data-parallel ranks average their gradients, so each scales by their number
    as well. The sum over data-parallel ranks is under way while the first forwards run.
    """

    def __init__(
        self,
        targets: Sequence[Value],
        reduction: Reduction,
        weigh: Callable[[Value], float] | None,
        data_parallel: ProcessGroup | None,
    ) -> None:
        self._weights = [_weight(target, reduction, weigh) for target in targets]
        self._replicas = 1 if data_parallel is None else data_parallel.world_size
        self._total = sum(self._weights)
        self._sum: Work[torch.Tensor] | None = None
        if self._replicas > 1 and data_parallel is not None and reduction == "mean":
            total = torch.tensor([self._total], dtype=torch.float64, device="cpu")
            self._sum = data_parallel.all_reduce(total, async_op=True)
        if reduction == "sum":
            self._total = 1.0

    def counts(self, microbatch: int) -> bool:
        """Says whether the microbatch counts at all; does not wait."""
        return self._weights[microbatch] > 0

    def factor(self, microbatch: int) -> float:
        """Returns what the microbatch's loss counts in the loss of the batch."""
        if self._sum is not None:
            self._total, self._sum = float(self._sum.wait().item()), None
        if not self._total > 0:
            raise SizeMismatch("weights that add up to more than 0", self._total, "loss_weight", "nothing would count")
        return self._weights[microbatch] / self._total

    def gradient_factor(self, microbatch: int) -> float:
        """Returns what its gradient counts on this rank, before data-parallel ranks average theirs."""
        return self.factor(microbatch) * self._replicas


def _weight(target: Value, reduction: Reduction, weigh: Callable[[Value], float] | None) -> float:
    if reduction == "sum":
        return 1.0
    if weigh is None:
        return float(batch_size(target, "target") or 0)
    weight = weigh(target)
    number = _number(weight)
    if number is None or not 0 <= float(number) < math.inf:
        raise SizeMismatch("a number of at least 0", weight, "loss_weight(target)", "say how much a microbatch counts")
    return float(number)


def check_loss(loss: object) -> torch.Tensor:
    """Returns the loss if it is one number.

    Raises:
        SizeMismatch: loss_fn returned something else.
        UnsupportedOp: it has no memory of its own.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise SizeMismatch("a tensor with one element", got, "loss_fn(output, target)", "reduce it to one number")
    check_values(loss, "loss_fn(output, target)")
    return loss.reshape(())


def no_loss(output: Value) -> torch.Tensor:
    """Returns the loss of a microbatch that does not count: 0, with gradients of 0, whatever the output is."""
    made = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    nothing = [tensor.masked_fill(torch.ones_like(tensor, dtype=torch.bool), 0).sum().real for tensor in made]
    return sum(nothing[1:], nothing[0]) if nothing else torch.zeros((), device="cpu")


def is_here(number: torch.Tensor) -> bool:
    """Says whether a number can be read without waiting for a device."""
    return number.is_cpu


def check_finite(losses: Mapping[int, torch.Tensor], advice: str) -> None:
    """Reads the losses of some microbatches, all at once.

    Args:
        losses: by microbatch, on one device.
        advice: what has become of the gradients.

    Raises:
        NotFinite: one of them is not; of the first such microbatch.
    """
    numbers = list(losses.values())
    values = [numbers[0].item()] if len(numbers) == 1 else torch.stack(numbers).tolist() if numbers else []
    for microbatch, value in sorted(zip(losses, values, strict=True)):
        refuse_if_not_finite(microbatch, value, advice)


def refuse_if_not_finite(microbatch: int, loss: float, advice: str) -> None:
    """Looks at the loss of a microbatch.

    Args:
        microbatch: its number.
        loss: what was read.
        advice: what has become of the gradients.

    Raises:
        NotFinite: it is not.
    """
    if not math.isfinite(loss):
        raise NotFinite(
            f"the loss of microbatch {microbatch} is {loss}: look at its samples and at the learning rate; {advice}"
        )


def check_metrics(found: object, measured: Mapping[int, Mapping[str, Number]]) -> dict[str, Number]:
    """Returns metrics as numbers; those on a device stay tensors, so that nobody waits for it.

    Args:
        found: what the function returned.
        measured: what it gave for other microbatches.

    Raises:
        SizeMismatch: that is something else than a dict of numbers, or one with other names.
    """
    if isinstance(found, Mapping):
        numbers = {str(name): number for name, value in found.items() if (number := _number(value)) is not None}
        if len(numbers) == len(found):
            for microbatch, others in measured.items():
                if list(others) != list(numbers):
                    raise SizeMismatch(
                        f"{list(others)}, as of microbatch {microbatch}",
                        list(numbers),
                        "names of metrics(output, target)",
                        "name the same ones always",
                    )
            return numbers
    raise SizeMismatch(
        "a dict of numbers, such as {'accuracy': 0.5}",
        {name: type(value).__name__ for name, value in found.items()} if isinstance(found, Mapping) else repr(found),
        "metrics(output, target)",
        "reduce each to one number per microbatch",
    )


def _number(value: object) -> Number | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.item()) if is_here(value) else value.detach()
    return float(value) if isinstance(value, int | float) else None


def num_samples(value: Value, num_microbatches: int, what: str) -> int:
    """Returns the number of samples of a training batch.

    Raises:
        SizeMismatch: there are no samples, or fewer than microbatches.
    """
    samples = batch_size(value, what) if tensors_of(value) else None
    if samples is None:
        raise SizeMismatch("at least one tensor with a dim 0 of samples", "none", f"{what} of step()", "pass a batch")
    if samples < num_microbatches:
        raise SizeMismatch(
            f"at least {num_microbatches} samples for {num_microbatches} microbatches",
            f"{samples}",
            f"{what} of step()",
            "use a larger batch or fewer microbatches",
        )
    return samples
