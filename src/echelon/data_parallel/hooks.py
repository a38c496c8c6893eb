"""What happens to gradients between backward and the optimizer, as small objects that users can write too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.group import ProcessGroup


class GradientBucket(NamedTuple):
    """Gradients that are reduced together."""

    number: int
    """Which bucket of the layout; the same on every rank."""
    gradients: Tensor
    """All of them in a row, one-dimensional: what a hook writes the mean over all ranks into."""
    pieces: Sequence[Tensor]
    """A view for each parameter, in its shape."""


class GradientHook:
    """Reduces buckets of gradients; give one to DistributedDataParallel. Override what is to be different.

    A hook belongs to one model. Every rank must give the same hook with the same options.
    """

    dtype: torch.dtype | None = None
    """In which gradients are accumulated and given to `reduce`; None: that of their parameter."""

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


class CompressTo(GradientHook):
    """Sends gradients in half precision: half the bytes of float32.

    Each rank adds up one part, in float32, and sends the mean of that to the others: so a gradient is rounded twice,
    whatever the number of ranks, and float16 overflows only where a gradient or the mean does.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Takes torch.float16 (11 significant bits) or torch.bfloat16 (8, with the range of float32)."""
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype={dtype}: compress to torch.float16 or torch.bfloat16")
        self._sent_as = dtype

    def reduce(self, bucket: GradientBucket, group: ProcessGroup) -> None:
        """Sends each part to the rank that adds it up, and the means to all."""
        came = group.all_to_all(bucket.gradients.to(self._sent_as)).view(group.world_size, -1)
        mean = came.sum(0, dtype=torch.float32).div_(group.world_size)
        bucket.gradients.copy_(group.all_gather(mean.to(self._sent_as)))


class AccumulateIn(GradientHook):
    """Accumulates and reduces gradients in a wider dtype than the parameters have: float32 for bfloat16, say.

    What backwards under `no_sync` leave is kept there, not in .grad, and rounded once, after the reduction.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        """Takes the dtype to accumulate in."""
        self.dtype = dtype


class LocalSGD(GradientHook):
    """Leaves gradients local, and averages the parameters every `period` steps (Lin et al., 2020, arXiv:1808.07217).

    A period of 1 is the same as averaging gradients for plain SGD. Call `average` once more before the model is used.
    """

    def __init__(self, period: int) -> None:
        """Takes the number of steps from one average to the next."""
        if period < 1:
            raise ValueError(f"period={period}: average every 1 or more steps")
        self._period = period
        self._steps = 0

    def reduce(self, bucket: GradientBucket, group: ProcessGroup) -> None:  # noqa: ARG002
        """Leaves the gradients, and notes that a step was made."""
        self._steps += bucket.number == 0

    def before_forward(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        """Averages the parameters if it is time."""
        if self._steps >= self._period:
            self._steps = 0
            self.average(parameters, group)

    def average(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        """Replaces each parameter by its mean over all ranks. Blocks until it is done."""
        with torch.no_grad():
            for parameter in parameters:
                group.all_reduce(parameter.detach(), "mean")
