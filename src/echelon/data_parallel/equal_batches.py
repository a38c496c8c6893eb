"""Watch for batches that are equal on all ranks in the first steps of a program."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from echelon.call_site import warn
from echelon.data_parallel.excerpt import NOTHING, UNKNOWN, checksum, excerpts
from echelon.data_parallel.summary import Summary
from echelon.group.group import ProcessGroup

_BITS = 24
"""Bits of a number that stands for a batch. Squares of 32,768 ranks add up to less than 2^63."""


class EqualBatches:
    """Watch that warns once if all ranks got the same batch in the first step, and the same other one in the second.

    Such ranks compute the same gradients: a loader without a sampler deals every sample to each of them. A program that
    trains on one fixed batch is left alone. The watch ends with the second step, so it costs nothing in a long run.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """Begins to watch. Only rank 0 warns, since all ranks run the same program."""
        self._group = group
        self._first = 0
        self._is_found = False
        self.is_done = group.world_size == 1

    def number_of(self, tensors: Sequence[torch.Tensor]) -> int:
        """Returns a number above 0 that stands for the batch of a forward. 0: there is none, or the watch is over.

        Args:
            tensors: inputs of the forward. Some of their values are read.
        """
        found = NOTHING if self.is_done else checksum(excerpts(tensors))
        return 0 if found in (NOTHING, UNKNOWN) else found % (1 << _BITS) | 1

    def on_reduced(self, mine: int, summary: Summary) -> None:
        """A step's gradients have been reduced.

        Args:
            mine: the number of this rank's batch.
            summary: sums over all ranks.
        """
        if self.is_done:
            return
        if not summary.has_equal_batches() or mine == self._first:
            self.is_done = True
        elif self._first:
            self._is_found = True
        else:
            self._first = mine

    def on_step(self) -> None:
        """An optimizer has made a step on the parameters."""
        if self.is_done or not self._is_found:
            return
        self.is_done = True
        if self._group.rank == 0:
            warn(
                f"all {self._group.world_size} ranks got the same batch in each of the first two steps, so they train "
                "on each sample several times: give every rank samples of its own, by echelon.data.DataLoader or by "
                "torch's DistributedSampler"
            )
