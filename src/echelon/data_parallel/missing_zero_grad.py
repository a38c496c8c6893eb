"""Watch for a missing `optimizer.zero_grad()` in the first steps of a program."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from echelon.call_site import warn


class MissingZeroGrad:
    """Watch that warns once if no backward between two optimizer steps began with zero gradients.

    Between two steps one clean backward is enough: with accumulation later ones begin with gradients, and those of
    another model may pass through this one before its gradients are set to zero. The watch ends with the second step,
    so it costs nothing in a long run.
    """

    def __init__(self, rank: int) -> None:
        """Begins to watch. Only rank 0 warns, since all ranks run the same program."""
        self._warns = rank == 0
        self._has_stepped = self._has_backward = self._was_clean = False
        self.is_done = False

    def on_backward(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """A backward begins. Reads the gradients of the parameters, between the first two steps alone."""
        if self.is_done or not self._has_stepped or self._was_clean:
            return
        self._has_backward = True
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and type(gradient) is not torch.Tensor:  # a fake tensor has no values
                self.is_done = True
                return
            if gradient is not None and bool(gradient.any()):
                return
        self._was_clean = True

    def on_step(self) -> None:
        """An optimizer has made a step on the parameters."""
        if self.is_done:
            return
        if self._has_backward:
            self.is_done = True
            if self._warns and not self._was_clean:
                warn(
                    "the gradients of the last optimizer step were still there when the next backward began, and were "
                    "added to the new ones: call optimizer.zero_grad() after each optimizer.step()"
                )
        self._has_stepped = True
