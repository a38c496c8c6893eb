"""Loss and metrics of a batch, summed up from its microbatches, and a meter of activation memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import torch

from echelon.backends.admission import check_values, stands_for_device
from echelon.backends.work import Work
from echelon.errors import InvalidArgument, NotFinite, SizeMismatch, UnsupportedOp
from echelon.group.group import ProcessGroup
from echelon.pipeline.plan.action import Action
from echelon.pipeline.plan.cost import Costs
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.plan.simulate import peaks
from echelon.pipeline.stage.nested import Value, batch_size, tensors_of
from echelon.pipeline.stage.stage import Stage


class Memory(NamedTuple):
    """Peak of this rank's activations in bytes: tensors saved for backward, and gradients that wait for a W."""

    planned: int
    """Peak of the schedule, with the measured activation sizes of this rank's stages."""
    measured: int
    """Largest sum that was counted after an action."""


@dataclass
class Activations:
    """Bytes that one stage holds for one microbatch; for the largest, if microbatches differ. 0 if not measured."""

    activation: int = 0
    """Held from the forward to the end of the backward, or to the end of I."""
    weight_activation: int = 0
    """Held from the end of I to the end of W."""
    recomputed_activation: int = 0
    """Added when the forward is run again."""


def memory_costs(of_stages: Sequence[Activations]) -> Costs:
    """Returns costs with the activations of all stages, in bytes."""
    return Costs(
        activation=[size.activation for size in of_stages],
        weight_activation=[size.weight_activation for size in of_stages],
        # Below 0 if a stage saves less than its input, which is no longer counted once the forward was run again.
        recomputed_activation=[max(0, size.recomputed_activation) for size in of_stages],
        memory_unit="B",
    )


@dataclass
class Meter:
    """Byte counter of one run: measures a microbatch after each of its actions, as the plan counts it.

    Args:
        stages: this rank's stages by index, with `is_metered` set.
        but: addresses of memory that is not counted: parameters, buffers, and the user's tensors.
    """

    stages: Mapping[int, Stage]
    but: Collection[int]
    peak: int = 0
    of_stage: dict[int, Activations] = field(default_factory=dict)
    _held: dict[tuple[int, int], int] = field(default_factory=dict)

    def ran(self, action: Action) -> None:
        """Measures a microbatch after an action."""
        stage, kind, microbatch = action
        found = self.of_stage.setdefault(stage, Activations())
        size = self._look(stage, microbatch)
        if kind == "F":
            found.activation = max(found.activation, size)
        elif kind == "I":
            found.weight_activation = max(found.weight_activation, size)

    def recomputed(self, stage: int, microbatch: int) -> None:
        """Measures a microbatch after its forward was run again."""
        before = self._held[stage, microbatch]
        found = self.of_stage[stage]
        found.recomputed_activation = max(found.recomputed_activation, self._look(stage, microbatch) - before)

    def memory(self, schedule: Schedule, rank: int) -> Memory:
        """Returns the peak, planned and measured."""
        sizes = [self.of_stage.get(stage, Activations()) for stage in range(schedule.num_stages)]
        planned = peaks(schedule, memory_costs(sizes).per_stage(schedule.placement))[rank]
        return Memory(int(planned), self.peak)

    def _look(self, stage: int, microbatch: int) -> int:
        # 0 bytes after the end of its backward, so the sum follows the microbatches in flight.
        self._held[stage, microbatch] = size = self.stages[stage].num_bytes(microbatch, self.but)
        self.peak = max(self.peak, sum(self._held.values()))
        return size


Reduction = Literal["mean", "sum"]
Metrics: TypeAlias = Callable[[Value, Value], Mapping[str, torch.Tensor | float]]
"""metrics(output, target): numbers by name."""
Number: TypeAlias = torch.Tensor | float
"""A number, or a tensor of one element that was not read from its device yet."""


class Objective(NamedTuple):
    """Loss and metrics to train with, and the weights of microbatches in them."""

    loss_fn: Callable[[Value, Value], torch.Tensor] | None
    reduction: Reduction
    weigh: Callable[[Value], float] | None
    """weigh(target): weight of a microbatch in the mean. None: its number of samples."""
    metrics: Metrics | None

    def scale(self, targets: Sequence[Value], data_parallel: ProcessGroup | None) -> LossScale:
        """Returns the factors of some microbatches. Starts to sum their weights over data-parallel ranks."""
        return LossScale(targets, self.reduction, self.weigh, data_parallel)


class LossScale:
    """Factors with which the losses of microbatches add up to the loss, and the gradient, of the batch.

    With "mean", microbatch i has the factor w_i / W: w_i is its number of samples (or `weigh(target)`), W the sum over
    the whole batch, data-parallel ranks included. With "sum" it has 1. The loss of a microbatch of weight 0 is not
    computed, since a mean over nothing is NaN. Data-parallel ranks average their gradients, so gradients are scaled by
    the number of these ranks as well. The sum over data-parallel ranks is in flight while the first forwards run.
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
        """Whether the weight of the microbatch is above 0. Does not wait."""
        return self._weights[microbatch] > 0

    def factor(self, microbatch: int) -> float:
        """Returns the factor of the microbatch's loss. The first call waits for the sum over data-parallel ranks.

        Raises:
            SizeMismatch: all weights of the batch are 0.
        """
        if self._sum is not None:
            self._total, self._sum = float(self._sum.wait().item()), None
        if not self._total > 0:
            raise SizeMismatch(
                "weights that add up to more than 0",
                self._total,
                "loss_weight",
                "give a weight above 0 to at least one microbatch",
            )
        return self._weights[microbatch] / self._total

    def gradient_factor(self, microbatch: int) -> float:
        """Returns the factor of its gradient on this rank, before data-parallel ranks average their gradients."""
        return self.factor(microbatch) * self._replicas


def _weight(target: Value, reduction: Reduction, weigh: Callable[[Value], float] | None) -> float:
    if reduction == "sum":
        return 1.0
    if weigh is None:
        return float(batch_size(target, "target") or 0)
    weight = weigh(target)  # the user's function: checked like an argument
    number = _number(weight)
    if number is None or not 0 <= float(number) < math.inf:
        raise SizeMismatch("a number of at least 0", weight, "loss_weight(target)", "return the weight of a microbatch")
    return float(number)


def check_loss(loss: object) -> torch.Tensor:
    """Returns the loss as a tensor without dims.

    Raises:
        SizeMismatch: the loss is not a tensor of one element.
        UnsupportedOp: the loss is complex, or has no memory of its own.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise SizeMismatch("a tensor with one element", got, "loss_fn(output, target)", "reduce it to one number")
    check_values(loss, "loss_fn(output, target)")
    if loss.is_complex():
        raise UnsupportedOp(f"loss_fn(output, target) returned {loss.dtype}: make it real, such as by .abs() or .real")
    return loss.reshape(())


def no_loss(output: Value) -> torch.Tensor:
    """Returns the loss of a microbatch of weight 0: 0, with gradients of 0 even if the output is NaN."""
    made = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    # Not multiplied by 0: NaN and infinity times 0 are NaN.
    nothing = [tensor.masked_fill(torch.ones_like(tensor, dtype=torch.bool), 0).sum().real for tensor in made]
    return sum(nothing[1:], nothing[0]) if nothing else torch.zeros((), device="cpu")


def is_here(number: torch.Tensor) -> bool:
    """Whether a number can be read without waiting for a device."""
    return number.is_cpu and not stands_for_device(number)


def check_finite(losses: Mapping[int, torch.Tensor], advice: str) -> None:
    """Reads the losses of some microbatches at once, and checks them. Waits for their device.

    Args:
        losses: by microbatch, on one device.
        advice: the state of the gradients, for the message.

    Raises:
        NotFinite: a loss is NaN or infinite; it names the first such microbatch.
    """
    numbers = list(losses.values())
    # One stacked read for all, since each read waits for the device. One loss needs no stack.
    values = [numbers[0].item()] if len(numbers) == 1 else torch.stack(numbers).tolist() if numbers else []
    for microbatch, value in sorted(zip(losses, values, strict=True)):
        refuse_if_not_finite(microbatch, value, advice)


def refuse_if_not_finite(microbatch: int, loss: float, advice: str) -> None:
    """Checks the loss of a microbatch.

    Args:
        microbatch: its number.
        loss: its loss, as read.
        advice: the state of the gradients, for the message.

    Raises:
        NotFinite: the loss is NaN or infinite.
    """
    if not math.isfinite(loss):
        raise NotFinite(
            f"the loss of microbatch {microbatch} is {loss}: look at its samples and at the learning rate; {advice}"
        )


def check_metrics(found: object, measured: Mapping[int, Mapping[str, Number]]) -> dict[str, Number]:
    """Returns metrics as numbers. Tensors on a device stay tensors, so that the CPU does not wait.

    Args:
        found: the result of the metrics function.
        measured: its results for other microbatches.

    Raises:
        SizeMismatch: the result is not a dict of numbers, or its names differ from earlier ones.
    """
    if isinstance(found, Mapping):
        numbers = {str(name): number for name, value in found.items() if (number := _number(value)) is not None}
        if len(numbers) == len(found):
            # The metrics are averaged by position, so all microbatches must have the same names in the same order.
            for microbatch, others in measured.items():
                if list(others) != list(numbers):
                    raise SizeMismatch(
                        f"{list(others)}, as of microbatch {microbatch}",
                        list(numbers),
                        "names of metrics(output, target)",
                        "return the same names for every microbatch",
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
        InvalidArgument: there are none.
        SizeMismatch: there are fewer samples than microbatches.
    """
    samples = batch_size(value, what) if tensors_of(value) else None
    if samples is None:
        noun, place = ("targets", "target=") if what == "target" else ("inputs", "positional arguments")
        is_missing = value is None or (isinstance(value, tuple) and not value)
        them = "them" if is_missing else "a tensor with a dim 0 of samples"
        raise InvalidArgument(f"step() needs the {noun} of the batch: pass {them} as {place}")
    if samples < num_microbatches:
        raise SizeMismatch(
            f"at least {num_microbatches} samples for {num_microbatches} microbatches",
            f"{samples}",
            f"{what} of step()",
            "use a larger batch or fewer microbatches",
        )
    return samples
