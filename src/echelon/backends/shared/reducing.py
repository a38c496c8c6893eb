"""The collectives that combine what the ranks have.

Values are added in the order of the ranks on every rank, so all get the same bits; 8- and 16-bit floats as float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from echelon.backends.native import Call, Place
from echelon.backends.operators import Operator, accumulation_dtype
from echelon.backends.shared import layout
from echelon.backends.shared.room import Shared
from echelon.backends.shared.short_way import meet_with, part_together
from echelon.backends.shared.streaming import pass_by, stream

_MEMMOVE_BYTES = 2048
"""Up to so many, moving bytes is faster than calling torch."""
_SLOT_BYTES = 512 << 10
_STAGED_SLOT_BYTES = 1 << 20
_SLICE_BYTES = 256 << 10
"""How much of a slice is combined and written at a time, so that it stays in the cache."""
_ALIGNMENT = 64
"""Elements; slices begin at multiples of it."""


def all_reduce(shared: Shared, call: Call, tensor: torch.Tensor, operator: Operator) -> None:
    """Combines `tensor` over all ranks, in place."""
    if tensor.nbytes <= layout.SMALL_BYTES:
        places = _show(shared, call, tensor)
        _combine(tensor, places, operator)
        return
    flat = tensor.contiguous().view(-1)
    everywhere = meet_with(shared, call, flat)
    if everywhere is not None:
        _reduce_slices(shared, call, everywhere, operator)
    elif shared.num_ranks == 2:
        _reduce_pieces(shared, call, flat, operator, readers=(0, 1))
    else:
        _reduce_parts(shared, call, flat, operator)
    _write_back(flat, tensor)


def reduce(shared: Shared, call: Call, tensor: torch.Tensor, dst: int, operator: Operator) -> None:
    """Combines `tensor` over all ranks, in place on rank `dst`."""
    if tensor.nbytes <= layout.SMALL_BYTES:
        places = _show(shared, call, tensor)
        if shared.rank == dst:
            _combine(tensor, places, operator)
        return
    flat = tensor.contiguous().view(-1)
    everywhere = meet_with(shared, call, flat)
    if everywhere is None:
        _reduce_pieces(shared, call, flat, operator, readers=(dst,))
    else:
        if shared.rank == dst:
            _combine_slice(flat, everywhere, 0, operator)
        part_together(shared, call)
    _write_back(flat, tensor)


def reduce_scatter(shared: Shared, call: Call, tensor: torch.Tensor, operator: Operator, place: Place) -> torch.Tensor:
    """Combines `tensor` over all ranks and returns this rank's part of dim 0."""
    rank, count = shared.rank, shared.num_ranks
    parts = tensor.tensor_split(count)
    result = place(parts[rank].shape)
    if tensor.nbytes <= layout.SMALL_BYTES:
        places = _show(shared, call, tensor)
        _combine(result, [place.tensor_split(count)[rank] for place in places], operator)
        return result
    everywhere = meet_with(shared, call, tensor.contiguous().view(-1))
    if everywhere is not None:
        start = sum(part.numel() for part in parts[:rank])
        _combine_slice(result.view(-1), everywhere, start, operator)
        part_together(shared, call)
        return result
    flats = [part.contiguous().view(-1) for part in parts]
    size = _SLOT_BYTES // tensor.itemsize // count  # of each part, in a slot
    slots = shared.rooms.slots(_SLOT_BYTES, tensor.dtype)
    target = result.view(-1)

    def write(piece: int, slot: int) -> None:
        for peer, flat in enumerate(flats):
            here = flat[piece * size : (piece + 1) * size]
            slots[rank][slot][peer * size : peer * size + len(here)].copy_(here)

    def read(piece: int, slot: int) -> None:
        here = target[piece * size : (piece + 1) * size]
        start = rank * size
        if len(here):
            _combine(here, [slots[peer][slot][start : start + len(here)] for peer in range(count)], operator)

    stream(shared, call, -(-len(flats[0]) // size), write, read)
    return result


def _show(shared: Shared, call: Call, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Has each rank write all it has, and returns what all have written."""
    board, rooms, number = shared.board, shared.rooms, call.sequence
    places = rooms.small(number, tensor.shape, tensor.dtype)
    board.announce(call)
    size = tensor.nbytes
    if size <= _MEMMOVE_BYTES and tensor.is_contiguous():
        ctypes.memmove(rooms.small_address(shared.rank, number), tensor.data_ptr(), size)
    else:
        places[shared.rank].copy_(tensor)
    board.meet(call)
    return places


def _reduce_slices(shared: Shared, call: Call, everywhere: Sequence[torch.Tensor], operator: Operator) -> None:
    """Each rank combines its slice of all tensors where they are, and writes it to all while it is in the cache."""
    size = -(-everywhere[0].numel() // shared.num_ranks // _ALIGNMENT) * _ALIGNMENT
    slices = [flat[shared.rank * size : (shared.rank + 1) * size] for flat in everywhere]
    for parts in zip(*(torch.split(part, _SLICE_BYTES // part.itemsize) for part in slices), strict=True):
        if len(parts[0]):
            _combine(parts[0], parts, operator)
            for part in parts[1:]:
                part.copy_(parts[0])
    part_together(shared, call)


def _combine_slice(target: torch.Tensor, everywhere: Sequence[torch.Tensor], start: int, operator: Operator) -> None:
    """Combines what all tensors have from `start` on into a tensor of this rank, piece by piece."""
    for piece in torch.split(target, _SLICE_BYTES // target.itemsize):
        if len(piece):
            _combine(piece, [flat[start : start + len(piece)] for flat in everywhere], operator)
        start += len(piece)


def _reduce_pieces(shared: Shared, call: Call, flat: torch.Tensor, operator: Operator, readers: Sequence[int]) -> None:
    """Each rank writes its pieces; those who want the result read those of all others."""
    rank, count = shared.rank, shared.num_ranks
    slots = shared.rooms.slots(_SLOT_BYTES, flat.dtype)
    pieces = torch.split(flat, _SLOT_BYTES // flat.itemsize)

    def write(number: int, slot: int) -> None:
        piece = pieces[number]
        _head(slots[rank][slot], piece).copy_(piece)

    def read(number: int, slot: int) -> None:
        piece = pieces[number]
        parts = [piece if peer == rank else _head(slots[peer][slot], piece) for peer in range(count)]
        _combine(piece, parts, operator)

    writes = any(reader != rank for reader in readers)
    stream(shared, call, len(pieces), write if writes else pass_by, read if rank in readers else pass_by)


def _reduce_parts(shared: Shared, call: Call, flat: torch.Tensor, operator: Operator) -> None:
    """Each rank writes its pieces, combines its part of each, and reads the parts that others have combined."""
    rank, count = shared.rank, shared.num_ranks
    slots = shared.rooms.slots(_STAGED_SLOT_BYTES, flat.dtype)
    pieces = torch.split(flat, _STAGED_SLOT_BYTES // flat.itemsize)

    def part(number: int, slot: int, owner: int, part: int) -> torch.Tensor:
        return _head(slots[owner][slot], pieces[number]).tensor_split(count)[part]

    def write(number: int, slot: int) -> None:
        piece = pieces[number]
        _head(slots[rank][slot], piece).copy_(piece)

    def combine(number: int, slot: int) -> None:
        own = pieces[number].tensor_split(count)[rank]
        _combine(own, [part(number, slot, peer, rank) for peer in range(count)], operator)
        part(number, slot, rank, rank).copy_(own)

    def read(number: int, slot: int) -> None:
        for peer, own in enumerate(pieces[number].tensor_split(count)):
            if peer != rank:
                own.copy_(part(number, slot, peer, peer))

    stream(shared, call, len(pieces), write, combine, read)


def _head(slot: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """Returns as much of a slot as a piece needs."""
    return slot if slot.shape == piece.shape else slot[: len(piece)]


def _combine(target: torch.Tensor, parts: Sequence[torch.Tensor], operator: Operator) -> None:
    """Writes into `target` what the parts are combined to in their order; it may be one of them."""
    wide = accumulation_dtype(target.dtype)
    if wide is target.dtype and (len(parts) == 2 or not any(part is target for part in parts[2:])):
        operator.function(parts[0], parts[1], out=target)
        for part in parts[2:]:
            operator.combine(target, part)
        operator.finish(target, len(parts))
        return
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        operator.combine(total, part.to(wide))
    target.copy_(operator.finish(total, len(parts)))


def _write_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
