"""Watch for an optimizer that lacks the parameters of this rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from echelon.call_site import warn
from echelon.data_parallel.missing_zero_grad import MissingZeroGrad

OF_DDP = (
    "a step of {optimizer} changed no parameter of the model in DDP, and none of its own had a gradient: give the "
    "optimizer ddp.parameters(), not those of another model"
)
OF_STAGES = (
    "a step of {optimizer} changed no parameter of this rank's stages, and none of its own had a gradient: give the "
    "optimizer pipe.parameters(), not those of another model"
)


_watching: weakref.WeakSet[IdleOptimizer] = weakref.WeakSet()
"""Watches that are not over, of this process: of several ranks, if they are simulated."""


class IdleOptimizer:
    """Watch for an optimizer that does not have the parameters of this rank.

    Such an optimizer (of a model that was copied or built anew) steps without an error and changes nothing. It is
    recognised by a step in which no parameter had a gradient, so a second model that trains at the same time raises no
    alarm. The watch ends with the first step that updates a parameter of this rank, or the warning.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[nn.Parameter]],
        text: str,
        missing_zero_grad: MissingZeroGrad | None = None,
    ) -> None:
        """Begins to watch.

        Args:
            parameters: returns the parameters of this rank. Called each time: they may be replaced.
            text: the warning, with the field {optimizer} for the optimizer's class.
            missing_zero_grad: a watch that is called as well. None: the parameters have another one.
        """
        self._parameters = parameters
        self._text = text
        self._missing_zero_grad = missing_zero_grad
        self._is_done = self._has_begun = False
        self._idle = ""
        """Class name of an optimizer that made a step without gradients."""
        self.has_warned = False
        """Whether this rank has given the warning."""
        _watching.add(self)

    def check(self) -> None:
        """Warns if an optimizer has made a step without gradients since the first call.

        Call it when a step of the program begins that gives gradients to this rank's parameters.
        """
        if self._missing_zero_grad is not None:
            self._missing_zero_grad.on_backward(self._parameters(), reaches_all=True)
        self._has_begun = True
        if self._idle and not self._is_done:
            self._is_done = self.has_warned = True
            warn(self._text.format(optimizer=self._idle))
        if self._is_over():
            _watching.discard(self)

    def _is_over(self) -> bool:
        return self._is_done and (self._missing_zero_grad is None or self._missing_zero_grad.is_done)

    def _note(self, optimizer: Optimizer) -> None:
        if self._is_over():
            return
        stepped = [each for group in optimizer.param_groups for each in group["params"]]
        own = set(map(id, self._parameters()))
        if any(id(each) in own for each in stepped):
            self._is_done = True
            if self._missing_zero_grad is not None:
                self._missing_zero_grad.on_step(optimizer)
        elif self._has_begun and not self._is_done and all(each.grad is None for each in stepped):
            self._idle = type(optimizer).__name__


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for watch in list(_watching):
        watch._note(optimizer)


# Once, and for good: torch iterates over its global hooks, so one that comes or goes meanwhile is an error.
register_optimizer_step_post_hook(_after_step)
