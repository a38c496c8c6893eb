"""SyncBatchNorm: batch normalisation over the batches of all ranks, on any device that the group's backend handles.

Each rank sends the number, the mean and the squared deviations of its values. They combine into the statistics of the
whole batch without the cancellation of sums of squares (Chan, Golub and LeVeque, 1979). The forward takes one
collective, the backward one more.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.arguments import refuse_others
from echelon.backends.admission import check_values, stands_for_device
from echelon.data_parallel.broadcast import check_module
from echelon.errors import InvalidArgument, SizeMismatch, UnsupportedOp
from echelon.group.group import ProcessGroup
from echelon.launch.init import CURRENT, given_or_current
from echelon.wording import counted

_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
_REBUILD = "build its class on echelon.SyncBatchNorm"


def unsynchronized(module: nn.Module) -> str:
    """Says which layer inside a module is torch's SyncBatchNorm without torch.distributed. Empty if there is none.

    It would take the statistics of each rank alone, without an error.
    """
    if dist.is_available() and dist.is_initialized():
        return ""
    for name, layer in module.named_modules():
        trains = layer.training or any(each.requires_grad for each in layer.parameters())
        if trains and isinstance(layer, nn.SyncBatchNorm) and not isinstance(layer, SyncBatchNorm):
            # `convert` leaves a layer that is built on torch's as it is: it would lose what it adds.
            is_plain = type(layer) is nn.SyncBatchNorm
            return (
                f"{name!r} is torch's SyncBatchNorm, which normalises the batch of each rank alone without "
                f"torch.distributed: {'use echelon.SyncBatchNorm.convert(model)' if is_plain else _REBUILD}"
            )
    return ""


class Shares:
    """Shares of the ranks in the samples of each forward since gradients were last reduced.

    DDP weighs a rank by its samples of all these forwards, and SyncBatchNorm by its samples of each one.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[int, ...], Tensor] = {}

    def check(self, numbers: Tensor, group: ProcessGroup) -> None:
        """Compares the numbers of samples of one forward with the shares of the first. All ranks do the same.

        Raises:
            UnsupportedOp: a rank has another share.
        """
        if stands_for_device(numbers):
            return
        first = self._first.setdefault(tuple(group.ranks), numbers)
        # Values are not read if there is one forward, as on a device that would wait for it.
        if first is not numbers and not torch.equal(first * numbers.sum(), numbers * first.sum()):
            raise UnsupportedOp(
                f"the ranks have {_shown(first)} samples in one forward and {_shown(numbers)} in a later one that "
                "accumulates, whose shares differ, so SyncBatchNorm cannot weigh them as average='samples' does: give "
                "each rank the same share in both, or reduce after each backward"
            )


def _shown(numbers: Tensor) -> str:
    return " and ".join(str(int(number)) for number in numbers.tolist())


@dataclass
class Samples:
    """Number of this rank's samples in one forward, by which DDP weighs its gradients with `average="samples"`."""

    number: int = 0
    """0 until the forward has ended, and of an empty batch."""
    shares: Shares = field(default_factory=Shares)


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch normalisation that, in training, uses the values of all ranks, like one process on the whole batch.

    Ranks may have different numbers of samples, including none. Every rank must call forward, and backward, as often as
    the others; both block. Gradients of weight and bias cover this rank's samples only; DistributedDataParallel
    averages them. In evaluation it is the ordinary layer, and nothing is sent.

    Input and output: (samples, num_features) or (samples, num_features, ...).
    """

    @refuse_others(process_group="group")
    def __init__(
        self,
        num_features: int,
        group: ProcessGroup = CURRENT,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes the layer. Nothing is sent.

        Args:
            group: the ranks whose batches count as one. Default: that of `echelon.init()`, or of the simulated rank.
            num_features, eps, momentum, affine, track_running_stats, device, dtype: as for torch.nn.BatchNorm2d.

        Raises:
            InvalidArgument: `group` is no group, or there is none yet.
        """
        group = given_or_current(group)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._group = group
        self.samples: Samples | None = None
        """Set by DDP before each forward. None: all ranks count equally."""

    @classmethod
    def convert(cls, module: nn.Module, group: ProcessGroup = CURRENT) -> nn.Module:
        """Replaces every BatchNorm1d, 2d and 3d and torch's SyncBatchNorm inside `module`.

        Returns `module`, or its replacement if it is such a layer itself.
        Parameters and buffers stay the same objects, so an optimizer may be made before. Every rank must do the same.

        Args:
            module: the model, changed in place.
            group: the ranks whose batches are normalised together. Default: those of `echelon.init()`, or the simulated
                ranks.

        Raises:
            InvalidArgument: `module` is no instance of a module, or there is no group.
        """
        group = given_or_current(group)
        check_module(module)
        known: dict[int, SyncBatchNorm] = {}  # a layer under two names stays one layer
        for path, layer in list(module.named_modules(remove_duplicate=False)):
            if isinstance(layer, _BATCH_NORMS) or type(layer) is nn.SyncBatchNorm:
                new = known.setdefault(id(layer), cls._like(layer, group))
                if layer is module:
                    return new
                parent, _, name = path.rpartition(".")
                setattr(module.get_submodule(parent), name, new)
        return module

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: ProcessGroup | None = None) -> nn.Module:
        """Replaces layers as `convert` does. The inherited method would make torch's layer. Returns the module.

        Args:
            module: as for `convert`.
            process_group: `group` of `convert`. None: its default.

        Raises:
            InvalidArgument: as `convert`.
        """
        return cls.convert(module, CURRENT if process_group is None else process_group)

    @classmethod
    def _like(
        cls, layer: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm, group: ProcessGroup
    ) -> SyncBatchNorm:
        new = cls(layer.num_features, group, layer.eps, layer.momentum, False, False)
        new.affine, new.track_running_stats = layer.affine, layer.track_running_stats
        new.weight, new.bias = layer.weight, layer.bias
        for name, buffer in layer.named_buffers(recurse=False):
            new.register_buffer(name, buffer)
        return new.train(layer.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """Returns a copy for the same ranks, as in an average of a model's weights. DDP does not know the copy."""
        memo[id(self._group)] = self._group
        memo[id(self)] = new = self.__new__(type(self))
        vars(new).update(copy.deepcopy(vars(self), memo))
        new.samples = None
        return new

    def forward(self, input: Tensor) -> Tensor:
        """Returns `input` with each feature normalised.

        In training, blocks for one collective and updates the running statistics.

        Args:
            input: [batch, num_features, ...], of a floating-point dtype.

        Raises:
            SizeMismatch: `input` has not `num_features` features in dim 1.
            UnsupportedOp: in training, `input` has no memory of its own.
            InvalidArgument: all ranks together have at most one value per feature.
            CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.all_gather`.
        """
        if self.training:
            check_values(input, "SyncBatchNorm")
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise SizeMismatch(
                f"(samples, {self.num_features}, ...)", tuple(input.shape), "SyncBatchNorm", "give it such an input"
            )
        if not self.training:
            own = (
                self.running_mean is None
            )  # without running statistics, evaluation uses this rank's batch, as in torch
            return nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, training=own, eps=self.eps
            )
        count, mean, variance = _statistics(input.detach(), self._group)
        if count <= 1:
            raise InvalidArgument(
                f"SyncBatchNorm got {counted(int(count), 'value')} per feature from all ranks together, and "
                "normalising takes 2 or more: give larger batches, or call eval()"
            )
        if self.running_mean is not None:
            self._track(count, mean, variance)
        output: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, count, mean, torch.rsqrt(variance + self.eps), self._group, self.samples
        )
        return output

    def _track(self, count: float, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = variance * (count / (count - 1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def _statistics(values: Tensor, group: ProcessGroup) -> tuple[float, Tensor, Tensor]:
    """Returns number, mean and variance of each feature's values over all ranks. Blocks. Same bits on every rank."""
    features = values.shape[1]
    wide = values.to(_wide(values.dtype))
    dims = _all_but_features(values)
    count = values.numel() // features if features else 0
    mean = wide.mean(dims) if count else wide.new_zeros(features)
    squares = (wide - _along(mean, values)).square().sum(dims)
    # One collective of 1 + 2 * features numbers. Gathered, not reduced: deviations cannot be combined before the mean
    # over all ranks is known.
    told = group.all_gather(torch.cat([wide.new_tensor([float(count)]), mean, squares]).unsqueeze(0))
    counts, means, deviations = told[:, :1], told[:, 1 : features + 1], told[:, features + 1 :]
    total = float(counts.sum())
    if stands_for_device(told):  # has no values: every rank is taken to have as many as this one
        total = float(count * len(counts))
    whole = (counts * means).sum(0) / max(total, 1.0)
    deviation = (deviations + counts * (means - whole).square()).sum(0)
    return total, whole, deviation / max(total, 1.0)


class _Normalise(Function):
    """y = (x - mean) / std * weight + bias, where mean and std depend on the x of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        count: float,
        mean: Tensor,
        inverse_std: Tensor,
        group: ProcessGroup,
        samples: Samples | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, inverse_std)
        ctx.count, ctx.group, ctx.samples, ctx.has_bias = count, group, samples, bias is not None
        scale = inverse_std if weight is None else inverse_std * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        return (x * _along(scale, x) + _along(shift, x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_std = ctx.saved_tensors
        dims = _all_but_features(x)
        wide = gradient.to(mean.dtype)
        normal = (x - _along(mean, x)) * _along(inverse_std, x)
        for_bias, for_weight = wide.sum(dims), (wide * normal).sum(dims)
        # The input gradient needs both sums over all ranks, since mean and std depend on every rank's input. Gradients
        # of weight and bias stay local.
        sums = torch.stack([for_bias, for_weight])
        if ctx.samples is None:
            sums = ctx.group.all_reduce(sums) / ctx.count
        else:
            # DDP weighs this rank's gradients by its samples afterwards. Other ranks' losses have weights of their own.
            number, features = ctx.samples.number, sums.shape[1]
            # Beside the sums, so that it takes no collective of its own.
            numbers = [float(number) if rank == ctx.group.rank else 0.0 for rank in range(ctx.group.world_size)]
            told = ctx.group.all_reduce(torch.cat([(sums * number).reshape(-1), sums.new_tensor(numbers)]))
            ctx.samples.shares.check(told[2 * features :].double(), ctx.group)
            sums = told[: 2 * features].view(2, features) / (ctx.count * max(number, 1))
        scale = inverse_std if weight is None else inverse_std * weight
        for_x = _along(scale, x) * (wide - _along(sums[0], x) - normal * _along(sums[1], x))
        return (
            for_x.to(x.dtype),
            None if weight is None else for_weight.to(weight.dtype),
            for_bias.to(x.dtype if weight is None else weight.dtype) if ctx.has_bias else None,
            *[None] * 5,  # count, mean, inverse_std, group and samples
        )


# As torch's own BatchNorm: statistics of half precision are computed in float32.
def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _all_but_features(tensor: Tensor) -> list[int]:
    return [0, *range(2, tensor.dim())]


def _along(per_feature: Tensor, like: Tensor) -> Tensor:
    return per_feature.view(1, -1, *[1] * (like.dim() - 2))
