"""Order in which ranks write, combine and read the pieces of a large operation. Pure: no memory in here.

All ranks do the same actions in the same order and count each in their tick. An operation begins with the tick of its
announcement. A rank that has seen this tick of every peer knows that all have left the operation before, so every slot
is free. From then on, an action waits until every peer has made the number of ticks that it needs:

- In stage 0 of a piece, each rank writes into its own slot, after all have done the last stage of the piece that was
  there before.
- Every later stage of a piece reads the slots that all peers have filled in the stage before.

Each stage lags `lag` pieces behind the one before, so a rank writes a piece while its peers still work on the previous
one:

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

    slot: index of the buffer that holds the piece. needs: number of actions of this operation that every peer must have
    done.
    """

    stage: int
    piece: int
    slot: int
    needs: int


@lru_cache(maxsize=256)
def pipeline(num_pieces: int, num_stages: int, lag: int, num_slots: int) -> tuple[Action, ...]:
    """Returns the actions of each rank, in order. The same for all ranks.

    Args:
        num_pieces: pieces of the operation.
        num_stages: at least 2.
        lag: pieces by which a stage follows the one before, at least 1.
        num_slots: buffers that pieces 0, 1, ... use in turn.

    Raises:
        PlanError: too few slots; a rank would wait for itself.
    """
    if num_slots <= (num_stages - 1) * lag:
        raise PlanError(
            f"{num_slots} slots for {num_stages} stages with lag {lag}: give one more than {num_stages - 1} x lag"
        )
    # Within a turn a rank writes its new piece before it reads the older one, so peers can go on while it reads.
    order = [
        (stage, turn - stage * lag)
        for turn in range(num_pieces + (num_stages - 1) * lag)
        for stage in range(num_stages)
        if 0 <= turn - stage * lag < num_pieces
    ]
    done_after = {action: number + 1 for number, action in enumerate(order)}
    # The wait also covers every earlier action, as ticks count actions in order. Tests play each interleaving of 2 and
    # 3 ranks and find every wait that is one tick too short.
    return tuple(
        Action(stage, piece, piece % num_slots, done_after.get(_before(stage, piece, num_stages, num_slots), 0))
        for stage, piece in order
    )


def _before(stage: int, piece: int, num_stages: int, num_slots: int) -> tuple[int, int]:
    """Returns the action that all ranks must have done before this one.

    Stage 0 overwrites a slot, so it waits for the last reader of the slot's previous piece; no such action exists for
    the first `num_slots` pieces.
    """
    return (stage - 1, piece) if stage else (num_stages - 1, piece - num_slots)
