"""Lets ranks with fewer batches take part in what the others still do.

Strategy. While ranks join, each tells all others what it does next, before each forward and each reduction, in one
round of one byte. Who has no batches left says so and does the same as the others, with gradients that count as none.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch

from echelon.errors import CollectiveMismatch
from echelon.group import ProcessGroup


class Next(IntEnum):
    """What a rank does next."""

    NOTHING = 0
    FORWARD = 1
    REDUCTION = 2


def announce(mine: Next, group: ProcessGroup) -> list[Next]:
    """Returns what each rank does next.

    Raises:
        CollectiveMismatch: on every rank, if two that still have batches do different things.
    """
    told = group.all_gather(torch.tensor([mine], dtype=torch.uint8, device="cpu"))
    steps = [Next(step) for step in told.tolist()]
    if {Next.FORWARD, Next.REDUCTION} <= set(steps):
        listed = ", ".join(f"rank {rank} {step.name.lower()}" for rank, step in zip(group.ranks, steps, strict=True))
        raise CollectiveMismatch(
            f"ranks that join do different things next ({listed}): run as many forwards for each backward on all ranks"
        )
    return steps


def first_active(steps: Sequence[Next]) -> int | None:
    """Returns the first rank that still has batches; None if there is none."""
    return next((rank for rank, step in enumerate(steps) if step != Next.NOTHING), None)
