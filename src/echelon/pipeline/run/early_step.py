"""Watch for an optimizer that steps inside of a step of the pipeline, where gradients are not complete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from echelon.errors import UnsupportedOp
from echelon.pipeline.stage.stage import Stage

_running: list[Mapping[int, Stage]] = []
"""Stages, by number, of the pipelines of this process that run now: of several ones, if ranks are simulated."""


@contextmanager
def early_steps_refused(stages: Mapping[int, Stage]) -> Iterator[None]:
    """Inside, an optimizer with a parameter of a stage raises UnsupportedOp. Hooks of parameters may call one.

    Its gradient would be that of the microbatches so far, not averaged over replicas, and the next microbatches would
    go backward through other weights than forward.
    """
    _running.append(stages)
    try:
        yield
    finally:
        # By identity: another one may be equal.
        del _running[next(at for at, each in enumerate(_running) if each is stages)]


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or not _running:
        return
    running = {
        id(parameter) for stages in _running for stage in stages.values() for parameter in stage.module.parameters()
    }
    if any(id(each) in running for group in optimizer.param_groups for each in group["params"]):
        raise UnsupportedOp(
            f"a step of {type(optimizer).__name__} began inside of pipe.step(), where gradients are not complete: "
            "call optimizer.step() after it, not in a hook of a parameter"
        )


# Once, and for good: torch iterates over its global hooks, so one that comes or goes meanwhile is an error.
register_optimizer_step_pre_hook(_before_step)
