"""Uneven numbers of batches: while ranks join, each announces its next step to all others.

Strategy. Each rank announces its next step before each forward and each reduction, in one all_gather of one byte. A
rank without batches announces NOTHING and takes part in the others' steps, with gradients that count as none. It ends
when all announce NOTHING. A rank without batches that ran forwards of its own would keep the others going, for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import torch

from echelon.errors import CollectiveMismatch, UnsupportedOp
from echelon.group.group import ProcessGroup
from echelon.purposes import JOIN


class Next(IntEnum):
    """Next step of a rank, as announced to the others. NOTHING: it has no batches left."""

    NOTHING = 0
    FORWARD = 1
    REDUCTION = 2


class Joining:
    """State of `join`: whether it is on, and which ranks still have batches."""

    def __init__(self, group: ProcessGroup) -> None:
        """Takes the group in which ranks announce their next steps."""
        self._group = group
        self._is_on = False
        self._in_step_of_others = False
        self.last_active = 0
        """Lowest rank that had a batch in the latest step with any."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, `announce` exchanges steps. A rank without batches must iterate over `others` before it leaves."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = self._in_step_of_others = False

    def others(self) -> Iterator[tuple[Next, int]]:
        """Yields the next step of the ranks with batches, and the lowest such rank. Ends when none has batches."""
        while (src := first_active(steps := self.announce(Next.NOTHING))) is not None:
            self._in_step_of_others = True
            yield steps[src], src
            self._in_step_of_others = False

    def announce(self, mine: Next) -> list[Next]:
        """Announces this rank's next step and returns the step of each rank. Blocks. Empty, at once, outside `on`.

        Raises:
            CollectiveMismatch: on every rank, if two that still have batches do different things.
            UnsupportedOp: this rank takes part in a step of others, and has none of its own.
        """
        if not self._is_on:
            return []
        if self._in_step_of_others:
            raise UnsupportedOp(
                f"update of join() runs a {mine.name.lower()}, for which this rank has no batch: let it step optimizer "
                "and scheduler alone; an optimizer that takes a closure needs as many batches on all ranks"
            )
        # device="cpu": torch.set_default_device may name another.
        with self._group.backend.flight_recorder.within(JOIN):
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
