"""Watch for an optimizer that steps inside of a step of the pipeline, where gradients are not complete."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from echelon.errors import UnsupportedOp
from echelon.pipeline.stage.stage import Stage


class EarlySteps:
    """Watch for an optimizer that hooks of parameters call, as to free each gradient at once.

    Its gradient would be that of the microbatches so far, not averaged over replicas, and the next microbatches would
    go backward through other weights than forward.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        """Begins to watch. `stages`: the stages of this rank."""
        self._stages = stages
        self._is_inside = False
        # The hook is global. With a weak reference it does not keep the watch alive, and goes with it.
        watch = weakref.ref(self)

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            if not torch.compiler.is_compiling() and (watching := watch()):
                watching._check(optimizer)

        weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Inside, an optimizer with a parameter of this rank's stages raises UnsupportedOp."""
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def _check(self, optimizer: Optimizer) -> None:
        if not self._is_inside:
            return
        own = {id(parameter) for stage in self._stages for parameter in stage.module.parameters()}
        if any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
            raise UnsupportedOp(
                f"a step of {type(optimizer).__name__} began inside of pipe.step(), where gradients are not complete: "
                "call optimizer.step() after it, not in a hook of a parameter"
            )
