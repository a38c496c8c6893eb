"""The collectives that combine what the ranks have.

Values are added in the order of the ranks on every rank, so all get the same bits; 8- and 16-bit floats as float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from echelon.backends.native import Call
from echelon.backends.operators import Operator, accumulation_dtype
from echelon.backends.shared import layout
from echelon.backends.shared.protocol import pipeline
from echelon.backends.shared.room import Shared

_MEMMOVE_BYTES = 2048
"""Up to so many, moving bytes is faster than calling torch."""
_PAIR_SLOT_BYTES = 512 << 10
_STAGED_SLOT_BYTES = 1 << 20


def all_reduce(shared: Shared, call: Call, tensor: torch.Tensor, operator: Operator) -> None:
    """Combines `tensor`, of any strides, over all ranks, in place."""
    if tensor.nbytes <= layout.SMALL_BYTES:
        _at_once(shared, call, tensor, operator)
        return
    flat = tensor.detach().contiguous().view(-1)
    if shared.num_ranks == 2:
        _in_pairs(shared, call, flat, operator)
    else:
        _staged(shared, call, flat, operator)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def _at_once(shared: Shared, call: Call, tensor: torch.Tensor, operator: Operator) -> None:
    """Each rank writes all it has, and combines what all have written."""
    board, number = shared.board, call.sequence
    places = shared.rooms.small(number, tensor.shape, tensor.dtype)
    board.announce(call)
    size = tensor.nbytes
    if size <= _MEMMOVE_BYTES and tensor.is_contiguous():
        ctypes.memmove(shared.rooms.small_address(shared.rank, number), tensor.data_ptr(), size)
    else:
        places[shared.rank].copy_(tensor)
    board.meet(call)
    _combine(tensor, places, operator)


def _in_pairs(shared: Shared, call: Call, flat: torch.Tensor, operator: Operator) -> None:
    """Two ranks: each writes its pieces, and combines the other's into its own tensor."""
    board, rank = shared.board, shared.rank
    slots = shared.rooms.slots(_PAIR_SLOT_BYTES, flat.dtype)
    pieces = torch.split(flat, _PAIR_SLOT_BYTES // flat.itemsize)
    board.announce(call)
    board.meet(call)
    for stage, number, slot, needs in pipeline(len(pieces), num_stages=2, lag=1, num_slots=4):
        if needs:
            board.wait_for_all(needs, call)
        piece = pieces[number]
        if stage == 0:
            _head(slots[rank][slot], piece).copy_(piece)
        else:
            other = _head(slots[1 - rank][slot], piece)
            _combine(piece, (piece, other) if rank == 0 else (other, piece), operator)
        board.tick()


def _staged(shared: Shared, call: Call, flat: torch.Tensor, operator: Operator) -> None:
    """Each rank writes its pieces, combines its part of each piece in its slot, and reads the parts of the others."""
    board, rank, count = shared.board, shared.rank, shared.num_ranks
    slots = shared.rooms.slots(_STAGED_SLOT_BYTES, flat.dtype)
    pieces = torch.split(flat, _STAGED_SLOT_BYTES // flat.itemsize)
    board.announce(call)
    board.meet(call)
    for stage, number, slot, needs in pipeline(len(pieces), num_stages=3, lag=1, num_slots=4):
        if needs:
            board.wait_for_all(needs, call)
        piece = pieces[number]
        if stage == 0:
            _head(slots[rank][slot], piece).copy_(piece)
        elif stage == 1:
            parts = [_head(slots[peer][slot], piece).tensor_split(count)[rank] for peer in range(count)]
            own = piece.tensor_split(count)[rank]
            _combine(own, parts, operator)
            parts[rank].copy_(own)
        else:
            for peer, part in enumerate(piece.tensor_split(count)):
                if peer != rank:
                    part.copy_(_head(slots[peer][slot], piece).tensor_split(count)[peer])
        board.tick()


def _head(slot: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """Returns as much of a slot as a piece needs."""
    return slot if slot.shape == piece.shape else slot[: len(piece)]


def _combine(target: torch.Tensor, parts: Sequence[torch.Tensor], operator: Operator) -> None:
    """Writes into `target`, which may be one of the parts, what they are combined to in their order."""
    wide = accumulation_dtype(target.dtype)
    if wide is target.dtype and all(part is not target for part in parts[2:]):
        operator.function(parts[0], parts[1], out=target)
        for part in parts[2:]:
            operator.combine(target, part)
        operator.finish(target, len(parts))
        return
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        operator.combine(total, part.to(wide))
    target.copy_(operator.finish(total, len(parts)))
