"""What one step works on, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from echelon.pipeline.loss import LossScale, Metrics, Number
from echelon.pipeline.nested import Value
from echelon.pipeline.randomness import Key


@dataclass
class Batch:
    """What one step works on, cut into microbatches, and what comes of it."""

    inputs: Sequence[tuple[Value, ...]] | None
    """For each microbatch the positional arguments of the first stage, where that is."""
    targets: Sequence[Value] | None
    """For each microbatch the target, where the last stage is."""
    kwargs: Sequence[Mapping[str, Value]]
    """For each microbatch the keyword arguments of all stages of this rank."""
    loss_fn: Callable[[Value, Value], torch.Tensor] | None
    scale: LossScale | None
    keeps_outputs: bool = False
    num_inputs: int = 0
    """Samples in `inputs`."""
    num_targets: int = 0
    """Samples in `targets`."""
    num_kwargs: int = 0
    """Samples in `kwargs`."""
    key: Key = field(default_factory=Key)
    """Of the random numbers."""
    metrics: Metrics | None = None
    grad_outputs: Sequence[Sequence[torch.Tensor | None]] = ()
    """Without a loss_fn, for each microbatch the gradients of the tensors of the output that require one."""
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    """For each microbatch its loss, not scaled yet."""
    outputs: dict[int, Value] = field(default_factory=dict)
    measured: dict[int, dict[str, Number]] = field(default_factory=dict)
    """What `metrics` gave."""
