"""The order in which ranks write, combine and read the pieces of a large operation. Pure: no memory in here.

Every rank does the same actions in the same order, and counts each in its tick. An operation begins with the tick of
its announcement; whoever has seen that tick of every peer knows that all of them have left the operation before, so
every slot is free. From then on an action waits until every peer has made as many ticks as it needs:

- stage 0 of a piece is written by each rank into its own slot, once all have done the last stage of the piece that was
  there before;
- every later stage of a piece reads what all peers have done in the stage before.

Stages lag behind each other by `lag` pieces, so a rank writes a piece while its peers still work on the one before:

    turn       0    1    2    3         2 stages, lag 1, 3 pieces
    stage 0    0    1    2
    stage 1         0    1    2
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from echelon.errors import PlanError


class Action(NamedTuple):
    """One stage of one piece.

    slot: where the piece is. needs: how many actions of this operation every peer must have done before.
    """

    stage: int
    piece: int
    slot: int
    needs: int


@lru_cache(maxsize=256)
def pipeline(num_pieces: int, num_stages: int, lag: int, num_slots: int) -> tuple[Action, ...]:
    """Returns what each rank does, in order.

    Args:
        num_pieces: how many pieces the operation has.
        num_stages: at least 2.
        lag: how many pieces a stage is behind the one before, at least 1.
        num_slots: in which pieces 0, 1, ... are put in turns.

    Raises:
        PlanError: with so few slots a rank would wait for itself.
    """
    if num_slots <= (num_stages - 1) * lag:
        raise PlanError(
            f"{num_slots} slots for {num_stages} stages with lag {lag}: give one more than {num_stages - 1} x lag"
        )
    order = [
        (stage, turn - stage * lag)
        for turn in range(num_pieces + (num_stages - 1) * lag)
        for stage in range(num_stages)
        if 0 <= turn - stage * lag < num_pieces
    ]
    done_after = {action: number + 1 for number, action in enumerate(order)}
    return tuple(
        Action(stage, piece, piece % num_slots, done_after.get(_before(stage, piece, num_stages, num_slots), 0))
        for stage, piece in order
    )


def _before(stage: int, piece: int, num_stages: int, num_slots: int) -> tuple[int, int]:
    """Returns the action that must have been done by all before this one."""
    return (stage - 1, piece) if stage else (num_stages - 1, piece - num_slots)
