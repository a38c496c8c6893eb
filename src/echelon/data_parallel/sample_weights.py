"""Weighs the gradients of each rank by its number of samples.

Each rank multiplies its gradients by its number over the mean number of the reduction before, which all know, and what
comes out is put right by the new one. So numbers stay in the range of the gradients, and ranks with equal numbers
multiply nothing; the first reduction of all has to ask for the mean.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from echelon.data_parallel.summary import Summary
from echelon.errors import UnsupportedOp
from echelon.group import ProcessGroup


class SampleWeights:
    """Remembers how many samples ranks have on average; the same on every rank."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._usual = 0.0
        """The mean over ranks in the last reduction; 0: there was none."""

    def expect(self, num_samples: int) -> None:
        """Called before a reduction, with the samples of this rank. Blocks the first time."""
        if not self._usual:
            told = self._group.all_reduce(torch.tensor(num_samples, dtype=torch.float64, device="cpu"), "mean")
            self._usual = told.item() or 1.0

    def weigh(self, gradients: torch.Tensor, num_samples: int) -> None:
        """Multiplies this rank's gradients by its weight."""
        _scale(gradients, num_samples / self._usual)

    def put_right(self, reduced: Iterable[torch.Tensor], summary: Summary) -> None:
        """Divides by the samples that there were on average instead of those that were expected.

        Raises:
            UnsupportedOp: ranks have gradients, and none has a sample.
        """
        if summary.num_samples:
            expected, self._usual = self._usual, summary.num_samples / self._group.world_size
            for gradients in reduced:
                _scale(gradients, expected / self._usual)
        elif any(summary.num_having):
            raise UnsupportedOp(
                "average='samples', and no rank has any: samples are the rows of the first tensor that is given to the "
                "model's forward; call the model so, or use average='ranks'"
            )


def _scale(gradients: torch.Tensor, factor: float) -> None:
    if factor == 0:
        gradients.zero_()  # the gradients of no samples may be NaN
    elif factor != 1:
        gradients.mul_(factor)
