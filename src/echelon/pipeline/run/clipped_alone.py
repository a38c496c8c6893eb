"""Watch for gradients that were clipped by the norm of one rank's stages, not by that of the model."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from echelon.call_site import warn
from echelon.pipeline.stage.stage import Stage

_STEPS = 3
"""Steps of optimizers that are watched. Each computes a norm twice."""
_MOST_NORMS = 100
"""Steps of the pipeline that are watched at most, as where none of torch's optimizers steps."""
_ROUND = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 7.5, 8, 9, 10)
"""Limits that programs give to clipping, but for powers of ten."""
_CLOSE = 3e-5
"""Relative deviation of a clipped norm from its limit: 1e-6 in torch's formula, and rounding."""

_WIDE = {each: torch.promote_types(each, torch.float32) for each in (torch.float16, torch.bfloat16, torch.float32)}
_WIDE[torch.float64] = torch.float64
"""Types of gradients, and those in which their norms are computed."""

_watching: weakref.WeakSet[ClippedAlone] = weakref.WeakSet()


class ClippedAlone:
    """Watch for `torch.nn.utils.clip_grad_norm_(model.parameters())` in a pipeline.

    Each rank would scale its gradients by another factor. It is recognised by a norm that falls to a round number
    between the pipeline's step and the optimizer's, as GradScaler or a factor of the program hardly leave one.
    """

    def __init__(self, rank: int, stages: Sequence[Stage]) -> None:
        """Begins to watch the parameters of `stages`, which rank `rank` holds."""
        self._rank = rank
        self._stages = stages
        self._steps_left = _STEPS
        self._norms_left = _MOST_NORMS
        self._norm: float | None = None
        _watching.add(self)

    def on_step(self) -> None:
        """Notes the norm of the gradients, at the end of a step of the pipeline."""
        if not self._norms_left:
            self.end()
        elif self._steps_left:
            self._norms_left -= 1
            self._norm = self._norm_now()

    def end(self) -> None:
        """Ends the watch, as when the pipeline itself clips."""
        self._steps_left, self._norm = 0, None
        _watching.discard(self)

    def _parameters(self) -> set[nn.Parameter]:
        return {each for stage in self._stages for each in stage.module.parameters()}

    def _norm_now(self) -> float | None:
        found = [each.grad for each in self._parameters() if each.grad is not None]
        if not found or not all(type(each) is torch.Tensor and _has_norm(each) for each in found):
            return None
        norms = [torch.linalg.vector_norm(each.detach(), dtype=_WIDE[each.dtype]) for each in found]
        return float(torch.linalg.vector_norm(torch.stack([each.to(norms[0]) for each in norms])))

    def _check(self, optimizer: Optimizer) -> None:
        if self._norm is None:
            return
        own = self._parameters()
        if not any(each in own for group in optimizer.param_groups for each in group["params"]):
            return
        norm, before = self._norm_now(), self._norm
        self._norm, self._steps_left = None, self._steps_left - 1
        if norm is not None and norm < before * (1 - 1e-3) and (limit := _limit(norm)):
            self.end()
            warn(
                f"rank {self._rank}: the gradients of this rank's stages were scaled to a norm of {limit:g}, as "
                "torch.nn.utils.clip_grad_norm_ does by the norm of these stages alone: call "
                "pipe.clip_grad_norm_(max_norm), which takes that of all stages"
            )
        elif not self._steps_left:
            self.end()


def _has_norm(gradient: torch.Tensor) -> bool:
    return not (gradient.is_sparse or gradient.is_meta) and gradient.dtype in _WIDE


def _limit(norm: float) -> float | None:
    """Returns the round number that a norm is. None if it is none."""
    if not (0 < norm < math.inf):
        return None
    unit = 10.0 ** math.floor(math.log10(norm))
    return next((each * unit for each in _ROUND if abs(norm / (each * unit) - 1) < _CLOSE), None)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for watch in list(_watching):
        watch._check(optimizer)


# Once, and for good: torch iterates over its global hooks, so one that comes or goes meanwhile is an error.
register_optimizer_step_pre_hook(_before_step)
