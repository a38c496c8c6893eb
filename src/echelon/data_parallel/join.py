"""Lets ranks with fewer batches take part in what the others still do.

Strategy. While ranks join, each tells all others what it does next, before each forward and each reduction, in one
round of one byte. Who has no batches left says so and does the same as the others, with gradients that count as none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import torch

from echelon.errors import CollectiveMismatch
from echelon.group import ProcessGroup


class Next(IntEnum):
    """What a rank does next."""

    NOTHING = 0
    FORWARD = 1
    REDUCTION = 2


class Joining:
    """Whether the ranks join at present, and which of them still have batches."""

    def __init__(self, group: ProcessGroup) -> None:
        """Takes the group in which ranks tell each other what they do next."""
        self._group = group
        self._is_on = False
        self.last_active = 0
        """The first of the ranks that had batches last."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Ranks may leave the with block early, if they take part in `others` before."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def others(self) -> Iterator[tuple[Next, int]]:
        """Yields what the other ranks do next, with the first of them, until none has batches."""
        while (src := first_active(steps := self.announce(Next.NOTHING))) is not None:
            yield steps[src], src

    def announce(self, mine: Next) -> list[Next]:
        """Tells the other ranks what is next, if ranks may leave early; returns what each does, else nothing.

        Raises:
            CollectiveMismatch: on every rank, if two that still have batches do different things.
        """
        if not self._is_on:
            return []
        told = self._group.all_gather(torch.tensor([mine], dtype=torch.uint8, device="cpu"))
        steps = [Next(step) for step in told.tolist()]
        if {Next.FORWARD, Next.REDUCTION} <= set(steps):
            pairs = zip(self._group.ranks, steps, strict=True)
            listed = ", ".join(f"rank {rank} {step.name.lower()}" for rank, step in pairs)
            raise CollectiveMismatch(
                f"ranks that join do different things next ({listed}): run as many forwards for each backward on all "
                "ranks"
            )
        active = first_active(steps)
        self.last_active = self.last_active if active is None else active
        return steps


def first_active(steps: Sequence[Next]) -> int | None:
    """Returns the first rank that still has batches; None if there is none."""
    return next((rank for rank, step in enumerate(steps) if step != Next.NOTHING), None)
