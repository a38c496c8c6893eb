"""Watch for batches that are equal on all ranks in the first steps of a program."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from echelon._torch_private.modules import never_compiled
from echelon.call_site import warn
from echelon.data_parallel.excerpt import NOTHING, UNKNOWN, checksum, excerpts
from echelon.data_parallel.summary import Summary
from echelon.group.group import ProcessGroup

_BITS = 24
"""Bits of a number that stands for a batch. Squares of 32,768 ranks add up to less than 2^63."""
_MOST = 3
"""Most reductions that are watched. A GAN's second one, of fake samples, may come before its first step."""
_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype)
"""Types of inputs whose text is compared."""


def joined(batch: int, other: int) -> int:
    """Returns the number that stands for the batches of two forwards. 0 if one of them is not known."""
    return (31 * batch + other) % (1 << _BITS) | 1 if batch and other else 0


class EqualBatches:
    """Watch that warns once if all ranks got the same batch in the first step, and the same other one in the second.

    Such ranks compute the same gradients: a loader without a sampler deals every sample to each of them. A program that
    trains on one fixed batch is left alone. The watch ends with the second step, or the third reduction. So it costs
    nothing in a long run.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """Begins to watch. Only rank 0 warns, since all ranks run the same program."""
        self._group = group
        self._first = 0
        self._num_equal = 0
        """Number of reductions in which all ranks had the same batch."""
        self.is_done = group.world_size == 1

    @never_compiled
    def number_of(self, inputs: Sequence[object]) -> int:
        """Returns a number above 0 that stands for the batch of a forward. 0: it is not known, or the watch is over.

        Args:
            inputs: inputs of the forward. Some values of its tensors are read.
        """
        if self.is_done or self._num_equal == _MOST:
            return 0
        tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        others = [each for each in inputs if not isinstance(each, torch.Tensor)]
        # The samples may be in another object, such as a graph. A tensor without dims is a setting, such as a time.
        if not any(tensor.dim() for tensor in tensors) or not all(isinstance(each, _PLAIN) for each in others):
            return 0
        found = checksum(excerpts(tensors))
        return 0 if found in (NOTHING, UNKNOWN) else (found ^ zlib.crc32(repr(others).encode())) % (1 << _BITS) | 1

    def on_reduced(self, mine: int, summary: Summary) -> None:
        """A step's gradients have been reduced.

        Args:
            mine: the number of this rank's batches.
            summary: sums over all ranks.
        """
        if self.is_done or self._num_equal == _MOST:
            return
        if not summary.has_equal_batches() or mine == self._first:
            self.is_done = True
        else:
            self._num_equal += 1
            self._first = self._first or mine

    def on_step(self) -> None:
        """An optimizer has made a step on the parameters."""
        if self.is_done or self._num_equal < 2:
            return
        self.is_done = True
        if self._group.rank == 0:
            warn(
                f"all {self._group.world_size} ranks got the same batch in each of the first two steps, so they train "
                "on each sample several times: give every rank samples of its own, by echelon.data.DataLoader or "
                "echelon.data.DistributedSampler"
            )
