"""Pipelined transfer of a large operation's pieces through the slots."""

from __future__ import annotations

from collections.abc import Callable

from echelon.backends.formats.slot_order import pipeline
from echelon.backends.shared.collectives.rank_region import Shared
from echelon.operation_records import OperationRecord

# All that there are with more than 2 ranks (SLOTS_BYTES / 2 MiB). 3 stages with lag 1 need 3.
NUM_SLOTS = 4
_LAG = 1

Stage = Callable[[int, int], None]
"""Action of one stage: takes the numbers of a piece and of its slot."""


def stream(shared: Shared, call: OperationRecord, num_pieces: int, *stages: Stage) -> None:
    """Takes every piece through all stages on this rank. Blocks until its last stage is done.

    All ranks must have announced the operation and passed `meet`.

    Args:
        shared: by the group.
        call: the operation.
        num_pieces: the same on all ranks.
        stages: the first writes into the rank's own slot. Each later one reads the slots that all ranks filled in
            the stage before.
    """
    board = shared.board
    for stage, piece, slot, needs in pipeline(num_pieces, len(stages), _LAG, NUM_SLOTS):
        # Needs 0: the slot is known to be free, since all ranks have left the operation before.
        if needs:
            board.wait_for_all(needs, call)
        stages[stage](piece, slot)
        # After the stage, also on a rank with nothing to do: peers count the ticks of all.
        board.tick()


def pass_by(_piece: int, _slot: int) -> None:
    """Stage of a rank that has nothing to do in it."""
