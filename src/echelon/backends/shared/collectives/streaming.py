"""How the pieces of a large operation pass through the slots."""

from __future__ import annotations

from collections.abc import Callable

from echelon.backends.formats.slot_order import pipeline
from echelon.backends.native import Call
from echelon.backends.shared.collectives.rank_region import Shared

NUM_SLOTS = 4
_LAG = 1

Stage = Callable[[int, int], None]
"""What a rank does with a piece of that number in a slot of that number."""


def stream(shared: Shared, call: Call, num_pieces: int, *stages: Stage) -> None:
    """Has this rank take every piece through all stages. All ranks have announced the operation, and have met.

    Args:
        shared: by the group.
        call: the operation.
        num_pieces: the same on all ranks.
        stages: the first writes into the rank's own slot; each other one reads what all have done in the one before.
    """
    board = shared.board
    for stage, piece, slot, needs in pipeline(num_pieces, len(stages), _LAG, NUM_SLOTS):
        if needs:
            board.wait_for_all(needs, call)
        stages[stage](piece, slot)
        board.tick()


def pass_by(_piece: int, _slot: int) -> None:
    """The stage of a rank that has nothing to do in it."""
