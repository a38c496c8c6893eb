"""Warning about an optimizer that was made of other parameters than those of this rank's stages.

Such an optimizer, made of a model of which the rank trains a copy or stages built anew, steps without an error and
changes nothing. It is recognised by a step in which no parameter had a gradient, so a second model that trains beside
the pipeline raises no alarm.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class IdleOptimizer:
    """Watches the steps of all optimizers until one has updated a parameter of this rank, or the warning is out."""

    def __init__(self, rank: int, parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]]) -> None:
        """Begins to watch.

        Args:
            rank: named in the warning.
            parameters: returns the parameters of this rank's stages by name; asked each time, as they may be replaced.
        """
        self._rank = rank
        self._parameters = parameters
        self._is_done = False
        self._idle = ""
        """The class of an optimizer that made a step without a gradient."""
        watch = weakref.ref(self)

        def after_step(optimizer: Optimizer, *_: Any) -> None:
            if not torch.compiler.is_compiling() and (watching := watch()):
                watching._note(optimizer)

        self._stop = weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)

    def check(self) -> None:
        """Warns if an optimizer has made a step without gradients while this rank's parameters have some."""
        if self._idle and not self._is_done and any(each.grad is not None for _, each in self._parameters()):
            self._is_done = True
            warnings.warn(
                f"rank {self._rank}: a step of {self._idle} changed no parameter of this rank's stages, and none of "
                "its own had a gradient: give the optimizer pipe.parameters(), not those of another model",
                stacklevel=3,
            )
        if self._is_done:
            self._stop()  # here, as torch goes through its hooks while `_note` runs; from now on a step costs nothing

    def _note(self, optimizer: Optimizer) -> None:
        if self._is_done:
            return
        stepped = [each for group in optimizer.param_groups for each in group["params"]]
        own = {id(parameter) for _, parameter in self._parameters()}
        if any(id(each) in own for each in stepped):
            self._is_done = True
        elif all(each.grad is None for each in stepped):
            self._idle = type(optimizer).__name__
