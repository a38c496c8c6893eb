"""What happens to gradients between backward and the optimizer, as small objects that users can write too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.data_parallel.broadcast import average_tensors
from echelon.group import ProcessGroup


class GradientBucket(NamedTuple):
    """Gradients that are reduced together."""

    number: int
    """Which bucket of the layout; the same on every rank. The layout changes after the first reduction."""
    gradients: Tensor
    """All of them in a row, one-dimensional: what a hook writes the mean over all ranks into."""
    pieces: Sequence[Tensor]
    """A view for each parameter, in its shape."""
    names: Sequence[str]
    """Of each parameter."""
    weight: float
    """What this rank counts for in the mean: 1, or the number of its samples. `gradients` are multiplied already."""


class GradientHook:
    """Reduces buckets of gradients; give one to DistributedDataParallel. Override what is to be different.

    A hook belongs to one model. Every rank must give the same hook with the same options: what `repr` says of it is
    compared, so override that if there are options.
    """

    dtype: torch.dtype | None = None
    """In which gradients are accumulated and given to `reduce`, if it is wider than that of their parameter."""

    leaves_gradients: bool = False
    """Whether gradients stay those of each rank, and it is the parameters that are brought together."""

    def reduce(self, bucket: GradientBucket, group: ProcessGroup) -> None:
        """Replaces the bucket's gradients by their mean over all ranks; may block.

        Called for each bucket when it is full, in the same order on every rank and one at a time, beside backward.

        Args:
            bucket: what to reduce; this rank's gradients, zeros where it has none.
            group: the ranks, for as many collectives as it takes. Nobody else uses it meanwhile.
        """
        group.all_reduce(bucket.gradients, "mean")

    def before_forward(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        """Called before each training forward that is to be synchronised, in the caller's thread."""

    def at_end(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        """Called when all ranks have left `join`, before they take the parameters of the last one."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class CompressTo(GradientHook):
    """Sends gradients in half precision: half the bytes of float32. What has no more bits already is sent as it is.

    Each rank adds up one part, in float32 or wider, and sends the mean of that to the others: so a gradient is rounded
    twice, whatever the number of ranks, and float16 overflows only where a gradient or the mean does.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Takes torch.float16 (11 significant bits) or torch.bfloat16 (8, with the range of float32)."""
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype={dtype}: compress to torch.float16 or torch.bfloat16")
        self._sent_as = dtype

    def reduce(self, bucket: GradientBucket, group: ProcessGroup) -> None:
        """Sends each part to the rank that adds it up, and the means to all."""
        gradients = bucket.gradients
        if gradients.is_complex():
            gradients = torch.view_as_real(gradients).view(-1)
        if gradients.element_size() <= self._sent_as.itemsize:
            super().reduce(bucket, group)
            return
        came = group.all_to_all(gradients.to(self._sent_as)).view(group.world_size, -1)
        mean = came.sum(0, dtype=gradients.dtype).div_(group.world_size)
        gradients.copy_(group.all_gather(mean.to(self._sent_as)))

    def __repr__(self) -> str:
        return f"CompressTo({self._sent_as})"


class AccumulateIn(GradientHook):
    """Accumulates and reduces gradients in a wider dtype than the parameters have: float32 for bfloat16, say.

    What backwards under `no_sync` leave is kept there; .grad is that, rounded. Parameters that are as wide already, and
    complex ones whose parts are, stay in their dtype.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        """Takes the dtype to accumulate in: torch.float32 or torch.float64."""
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype={dtype}: accumulate in torch.float32 or torch.float64")
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"AccumulateIn({self.dtype})"


class LocalSGD(GradientHook):
    """Leaves gradients local, and averages the parameters every `period` steps (Lin et al., 2020, arXiv:1808.07217).

    With `average="samples"` ranks weigh as many as the samples they had since the last average. A period of 1 is the
    same as averaging gradients for plain SGD. Call `average` once more before the model is used. The optimizer's state
    is each rank's own, so it cannot be sharded: not for ZeroOptimizer.
    """

    leaves_gradients = True

    def __init__(self, period: int) -> None:
        """Takes the number of steps from one average to the next."""
        if period < 1:
            raise ValueError(f"period={period}: average every 1 or more steps")
        self._period = period
        self._steps = 0
        self._weight = 0.0

    def reduce(self, bucket: GradientBucket, group: ProcessGroup) -> None:  # noqa: ARG002
        """Leaves the gradients, and notes that a step was made."""
        if bucket.number == 0:
            self._steps += 1
            self._weight += bucket.weight

    def before_forward(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        """Averages the parameters if it is time."""
        if self._steps >= self._period:
            self.average(parameters, group)

    def at_end(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        """Averages the parameters: nobody's last steps are lost."""
        self.average(parameters, group)

    def average(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        """Replaces each parameter by its mean over all ranks. Blocks until it is done. Every rank must call it."""
        total = group.all_reduce(torch.tensor(self._weight, dtype=torch.float64, device="cpu")).item()
        share = self._weight * group.world_size / total if total else 1.0
        self._steps, self._weight = 0, 0.0
        learnt = [one.detach() for one in parameters if one.is_floating_point() or one.is_complex()]
        if share != 1.0:
            for parameter in learnt:
                parameter.mul_(share)
        average_tensors(learnt, group)

    def __repr__(self) -> str:
        return f"LocalSGD({self._period})"
