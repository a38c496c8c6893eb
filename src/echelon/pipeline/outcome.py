"""What a step gave, told to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from echelon.backends.memory import dtype_code, dtype_of
from echelon.errors import SizeMismatch
from echelon.group import ProcessGroup
from echelon.pipeline.nested import Value
from echelon.pipeline.schedule import Schedule

Span = tuple[float, float]
"""When a step began and ended."""


@dataclass(frozen=True)
class StepOutput:
    """What one training step gave.

    loss: over the whole batch, data-parallel ranks included; zero-dim, on every rank. outputs: the last stage's, in
    batch order, on its rank and only if asked for; else None.
    """

    loss: torch.Tensor
    outputs: Value = None


class Told(NamedTuple):
    """What every rank knows after a step."""

    loss: torch.Tensor
    times: list[list[Span]]
    """For each rank, when each of its steps began and ended."""


def tell(
    group: ProcessGroup,
    schedule: Schedule,
    times: Sequence[Span],
    num_inputs: int,
    num_targets: int,
    loss: torch.Tensor | None,
) -> Told:
    """Gives every rank the loss, and when each step of every rank ran.

    Args:
        group: the ranks of the pipeline.
        schedule: what they ran.
        times: when each step of this rank began and ended.
        num_inputs: samples in the inputs, where the first stage is.
        num_targets: samples in the target, where the last stage is.
        loss: that of the batch, where the last stage is; else None.

    Raises:
        SizeMismatch: on every rank, if the first stage had another number of samples than the last.
    """
    code, value = (0.0, 0.0) if loss is None else (float(dtype_code(loss.dtype)), loss.item())
    row = torch.tensor(
        [num_inputs, num_targets, code, value, *(time for span in times for time in span)], dtype=torch.float64
    )
    rows = torch.split(group.all_gather(row), [4 + 2 * len(order) for order in schedule.orders])
    first, last = (rows[schedule.placement[stage]] for stage in (0, -1))
    if first[0] != last[1]:
        expected, got = f"{int(first[0])} samples, as the inputs", f"{int(last[1])}"
        raise SizeMismatch(expected, got, "target of step()", "pass one target per sample")
    all_times = [[(begin, end) for begin, end in part[4:].reshape(-1, 2).tolist()] for part in rows]
    return Told(last[3].to(dtype_of(int(last[2]))), all_times)
