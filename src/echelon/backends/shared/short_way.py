"""How an operation finds out whether it can reach into the tensors of all ranks, and how it ends if it can."""

from __future__ import annotations

import torch

from echelon.backends.memory import as_bytes
from echelon.backends.native import Call
from echelon.backends.shared.room import Shared


def meet_with(shared: Shared, call: Call, flat: torch.Tensor) -> list[torch.Tensor] | None:
    """Announces a large operation on a flat tensor, and returns when all ranks have come.

    Args:
        shared: by the group.
        call: the operation.
        flat: as many elements on all ranks.

    Returns:
        The flat tensors of all ranks, if all can be reached; such an operation ends with `part_together`. Else None.
    """
    board, count = shared.board, shared.symmetric.count
    reach = shared.symmetric.reach(as_bytes(flat))
    board.announce(call, reach.words)
    board.meet(call)
    if not count:
        return None
    announced = [[board.word(rank, index) for index in range(3)] for rank in range(shared.num_ranks)]
    everywhere = reach.everywhere(announced, [flat.nbytes] * shared.num_ranks)
    return None if everywhere is None else [part.view(flat.dtype) for part in everywhere]


def part_together(shared: Shared, call: Call) -> None:
    """Returns when all ranks have done what they do with the tensors of others."""
    shared.board.tick()
    shared.board.wait_for_all(1, call)
