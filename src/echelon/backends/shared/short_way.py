"""How an operation finds out whether it can reach into the tensors of all ranks, and how it ends if it can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from echelon.backends.memory import as_bytes
from echelon.backends.native import Call
from echelon.backends.shared.room import Shared, Small


class Met(NamedTuple):
    """What a rank knows when all ranks have come."""

    everywhere: list[torch.Tensor] | None
    """The flat tensors of all ranks, if all can be reached; such an operation ends with `part_together`."""
    shown: Sequence[torch.Tensor] | None
    """The same, as all ranks have written them beside their announcements, if all have."""


def meet_with(shared: Shared, call: Call, flat: torch.Tensor, small: Small | None = None) -> Met:
    """Announces a large operation on a flat tensor, and returns when all ranks have come.

    Args:
        shared: by the group.
        call: the operation.
        flat: as many elements on all ranks.
        small: where ranks show their tensors, those that are not where all can reach them; None: they do not.
    """
    board = shared.board
    reach = shared.symmetric.reach(as_bytes(flat))
    board.announce(call, reach.words)
    if small is not None and not reach.has_tensor:
        small.write(flat)
    board.meet(call)
    if not shared.symmetric.count:
        return Met(None, None if small is None else small.places)
    announced = [[board.word(rank, index) for index in range(3)] for rank in range(shared.num_ranks)]
    if small is not None and not any(number for number, *_ in announced):
        return Met(None, small.places)
    everywhere = reach.everywhere(announced, [flat.nbytes] * shared.num_ranks)
    return Met(None if everywhere is None else [part.view(flat.dtype) for part in everywhere], None)


def part_together(shared: Shared, call: Call) -> None:
    """Returns when all ranks have done what they do with the tensors of others."""
    shared.board.tick()
    shared.board.wait_for_all(1, call)
