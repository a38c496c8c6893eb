"""How an operation finds out whether it can reach into the tensors of all ranks, and how it ends if it can."""

from __future__ import annotations

import torch

from echelon.backends.native import Call
from echelon.backends.shared.room import Shared
from echelon.backends.shared.symmetric import Spot


def meet_with(shared: Shared, call: Call, flat: torch.Tensor) -> list[torch.Tensor] | None:
    """Announces a large operation on a flat tensor, and returns when all ranks have come.

    Returns:
        The flat tensors of all ranks, if all can be reached; such an operation ends with `part_together`. Else None.
    """
    board = shared.board
    board.announce(call, shared.symmetric.spot(flat))
    board.meet(call)
    spots = [Spot(board.word(rank, 0), board.word(rank, 1)) for rank in range(shared.num_ranks)]
    return shared.symmetric.everywhere(spots, flat)


def part_together(shared: Shared, call: Call) -> None:
    """Returns when all ranks have done what they do with the tensors of others."""
    shared.board.tick()
    shared.board.wait_for_all(1, call)
