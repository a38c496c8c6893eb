"""Watch for a missing `optimizer.zero_grad()` in the first steps of a program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.optim.optimizer import Optimizer

from echelon.call_site import warn

_MOST_BACKWARDS = 100
"""Backwards after which the watch ends at the latest: an optimizer may step once, and its gradients stay for ever."""


class MissingZeroGrad:
    """Watch that warns once if an optimizer's second step uses gradients of its first step.

    Between the two steps one clean backward is enough: with accumulation later ones begin with gradients, and those of
    another model may pass through this one before its gradients are set to zero. A backward that reaches none of the
    old gradients says nothing: another optimizer may train another part of the module. The watch ends with the second
    step, so it costs nothing in a long run.
    """

    def __init__(self, rank: int) -> None:
        """Begins to watch. Only rank 0 warns, since all ranks run the same program."""
        self._warns = rank == 0
        self._stepped: set[int] = set()
        """Parameters of the first optimizer that stepped, by id."""
        self.used: set[int] = set()
        """Parameters, by id, that begin this backward with gradients which that optimizer has used."""
        self._num_backwards = 0
        self._was_added_to = self._was_clean = False
        self.is_done = False

    def on_backward(self, parameters: Iterable[torch.nn.Parameter], *, reaches_all: bool = False) -> None:
        """A backward begins. Reads the gradients of the parameters, between the first two steps alone.

        Args:
            parameters: all parameters of the module.
            reaches_all: whether all of them get gradients. False: `on_gradient` is called for each that does.
        """
        if self.is_done or not self._stepped or self._was_clean:
            return
        self._num_backwards += 1
        self.used = set()
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None or id(parameter) not in self._stepped:
                continue
            if type(gradient) is not torch.Tensor:  # a fake tensor has no values
                self._end()
                return
            if bool(gradient.any()):
                self.used.add(id(parameter))
        self._was_clean = not self.used
        self._was_added_to |= reaches_all and not self._was_clean
        if self._num_backwards == _MOST_BACKWARDS:
            self._end()

    def on_gradient(self, parameter: torch.nn.Parameter) -> None:
        """A parameter gets a gradient. Need not be called while `used` is empty."""
        self._was_added_to |= id(parameter) in self.used

    def on_step(self, optimizer: Optimizer) -> None:
        """An optimizer has made a step on the parameters."""
        if self.is_done:
            return
        if not self._stepped:
            self._stepped = set(_parameters_of(optimizer))
        elif self._num_backwards and not self._stepped.isdisjoint(_parameters_of(optimizer)):
            if self._warns and self._was_added_to and not self._was_clean:
                warn(
                    "the gradients of the last optimizer step were still there when the next backward began, and were "
                    "added to the new ones: call optimizer.zero_grad() after each optimizer.step()"
                )
            self._end()

    def _end(self) -> None:
        self.is_done = True
        self.used, self._stepped = set(), set()


def _parameters_of(optimizer: Optimizer) -> Iterator[int]:
    return (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
