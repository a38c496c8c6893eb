"""The collectives that combine what the ranks have.

Values are added in the order of the ranks on every rank, so all get the same bits; 8- and 16-bit floats as float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from echelon.backends.formats import memory_layout
from echelon.backends.memory import copy_contiguous
from echelon.backends.native import Allocate, Call
from echelon.backends.operators import Operator, accumulation_dtype
from echelon.backends.shared.collectives.exchange import exit_barrier, meet_with
from echelon.backends.shared.collectives.rank_region import Shared
from echelon.backends.shared.collectives.streaming import pass_by, stream

_SLICE_BYTES = 256 << 10
"""How much of a slice is combined and written at a time, so that it stays in the cache."""
_ALIGNMENT = 64
"""Elements; slices begin at multiples of it."""


def all_reduce(shared: Shared, call: Call, tensor: torch.Tensor, operator: Operator) -> None:
    """Combines `tensor` over all ranks, in place."""
    if tensor.nbytes <= memory_layout.SMALL_BYTES:
        _reduce_small(shared, call, tensor, operator)
        return
    flat = tensor.contiguous().view(-1)
    fits = flat.nbytes <= memory_layout.SHOWN_BYTES
    small = shared.rooms.small(call.sequence, flat.shape, flat.dtype) if fits else None
    everywhere, shown = meet_with(shared, call, flat, small)
    if everywhere is not None:
        _reduce_slices(shared, call, everywhere, operator)
    elif shown is not None and shared.num_ranks == 2:
        _combine(flat, [flat if peer == shared.rank else place for peer, place in enumerate(shown)], operator)
    elif shown is not None:
        _reduce_shown(shared, call, flat, operator)
    elif shared.num_ranks == 2:
        _reduce_pieces(shared, call, flat, operator, readers=(0, 1))
    else:
        _reduce_parts(shared, call, flat, operator)
    _write_back(flat, tensor)


def reduce(shared: Shared, call: Call, tensor: torch.Tensor, dst: int, operator: Operator) -> None:
    """Combines `tensor` over all ranks, in place on rank `dst`."""
    if tensor.nbytes <= memory_layout.SHOWN_BYTES:
        _reduce_shown_to(shared, call, tensor, dst, operator)
        return
    flat = tensor.contiguous().view(-1)
    everywhere, _ = meet_with(shared, call, flat)
    if everywhere is None:
        _reduce_pieces(shared, call, flat, operator, readers=(dst,))
    else:
        _reduce_slices_to(shared, call, everywhere, dst, operator)
    _write_back(flat, tensor)


def reduce_scatter(
    shared: Shared, call: Call, tensor: torch.Tensor, operator: Operator, place: Allocate
) -> torch.Tensor:
    """Combines `tensor` over all ranks and returns this rank's part of dim 0."""
    rank, count = shared.rank, shared.num_ranks
    result = place((len(range(rank, len(tensor), count)), *tensor.shape[1:]))  # as torch.tensor_split
    if tensor.nbytes <= memory_layout.SMALL_BYTES:
        _show(shared, call, tensor)
        _combine(result, shared.rooms.small_parts(call.sequence, tensor.shape, tensor.dtype)[rank], operator)
        return result
    parts = tensor.tensor_split(count)
    if count == 2 and tensor.nbytes <= memory_layout.SHOWN_BYTES:
        _exchange_halves(shared, call, parts, result, operator)
        return result
    everywhere, _ = meet_with(shared, call, tensor.contiguous().view(-1))
    if everywhere is not None:
        start = sum(part.numel() for part in parts[:rank])
        _combine_slice(result.view(-1), everywhere, start, operator)
        exit_barrier(shared, call)
        return result
    _reduce_shares(shared, call, [part.contiguous().view(-1) for part in parts], result.view(-1), operator)
    return result


def _reduce_small(shared: Shared, call: Call, tensor: torch.Tensor, operator: Operator) -> None:
    """Combines what all have shown; where ranks take turns on the cores, one does so for those that come after it."""
    places = _show(shared, call, tensor)
    size = tensor.nbytes
    if not shared.takes_turns or size > memory_layout.RESULT_BYTES or not tensor.is_contiguous():
        _combine(tensor, places, operator)
    elif (result := shared.board.result()) is not None:
        ctypes.memmove(tensor.data_ptr(), result, size)
    else:
        _combine(tensor, places, operator)
        shared.board.give_result(tensor.data_ptr(), size)


def _reduce_shown_to(shared: Shared, call: Call, tensor: torch.Tensor, dst: int, operator: Operator) -> None:
    """Rank `dst` combines what the others have written with its own."""
    is_reader = shared.rank == dst
    reads_own = is_reader and dst < 2  # one that comes later would be combined elsewhere, and copied
    places = _show(shared, call, tensor, writes=not reads_own)
    if is_reader:
        _combine(
            tensor, [tensor if reads_own and peer == dst else place for peer, place in enumerate(places)], operator
        )


def _exchange_halves(
    shared: Shared, call: Call, halves: Sequence[torch.Tensor], result: torch.Tensor, operator: Operator
) -> None:
    """Each of 2 ranks writes what the other one wants, and combines what that has written with its own."""
    rank = shared.rank
    places = shared.rooms.small(call.sequence, halves[rank].shape, result.dtype).places
    shared.board.announce(call)
    shared.rooms.small(call.sequence, halves[1 - rank].shape, result.dtype).write(halves[1 - rank])
    shared.board.meet(call)
    _combine(result, [halves[rank] if peer == rank else place for peer, place in enumerate(places)], operator)


def _show(shared: Shared, call: Call, tensor: torch.Tensor, *, writes: bool = True) -> Sequence[torch.Tensor]:
    """Has each rank write all it has, unless nobody reads it, and returns the places of all."""
    board = shared.board
    small = shared.rooms.small(call.sequence, tensor.shape, tensor.dtype)
    board.announce(call)
    if writes:
        small.write(tensor)
    board.meet(call)
    return small.places


def _reduce_shown(shared: Shared, call: Call, flat: torch.Tensor, operator: Operator) -> None:
    """Each rank combines its part of what all have written, and reads the parts that others have combined."""
    rank = shared.rank
    shown = shared.rooms.small_parts(call.sequence, flat.shape, flat.dtype)
    targets = flat.tensor_split(shared.num_ranks)
    _combine(targets[rank], shown[rank], operator)
    copy_contiguous(targets[rank], shown[rank][rank])
    exit_barrier(shared, call)
    for peer, target in enumerate(targets):
        if peer != rank:
            copy_contiguous(shown[peer][peer], target)


def _reduce_slices(shared: Shared, call: Call, everywhere: Sequence[torch.Tensor], operator: Operator) -> None:
    """Each rank combines its slice of all tensors where they are, and writes it to all while it is in the cache."""
    for parts in _pieces_of_slices(shared, everywhere):
        _combine(parts[0], parts, operator)
        for part in parts[1:]:
            copy_contiguous(parts[0], part)
    exit_barrier(shared, call)


def _reduce_slices_to(
    shared: Shared, call: Call, everywhere: Sequence[torch.Tensor], dst: int, operator: Operator
) -> None:
    """Each rank combines its slice of all tensors, and writes it to rank `dst`; other tensors stay as they are."""
    scratch = everywhere[0].new_empty(_SLICE_BYTES // everywhere[0].itemsize)
    for parts in _pieces_of_slices(shared, everywhere):
        total = scratch[: len(parts[0])]
        _combine(total, parts, operator)
        copy_contiguous(total, parts[dst])
    exit_barrier(shared, call)


def _pieces_of_slices(shared: Shared, everywhere: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Returns this rank's slice of all tensors, in pieces that fit into the cache."""
    size = -(-everywhere[0].numel() // shared.num_ranks // _ALIGNMENT) * _ALIGNMENT
    slices = [flat[shared.rank * size : (shared.rank + 1) * size] for flat in everywhere]
    pieces = zip(*(torch.split(part, _SLICE_BYTES // part.itemsize) for part in slices), strict=True)
    return (parts for parts in pieces if len(parts[0]))


def _combine_slice(target: torch.Tensor, everywhere: Sequence[torch.Tensor], start: int, operator: Operator) -> None:
    """Combines what all tensors have from `start` on into a tensor of this rank, piece by piece."""
    for piece in torch.split(target, _SLICE_BYTES // target.itemsize):
        if len(piece):
            _combine(piece, [flat[start : start + len(piece)] for flat in everywhere], operator)
        start += len(piece)


def _reduce_pieces(shared: Shared, call: Call, flat: torch.Tensor, operator: Operator, readers: Sequence[int]) -> None:
    """Each rank writes its pieces; those who want the result read those of all others."""
    rank, count, rooms = shared.rank, shared.num_ranks, shared.rooms
    slots = rooms.slots(flat.dtype)
    pieces = torch.split(flat, rooms.slot_bytes // flat.itemsize)

    def write(number: int, slot: int) -> None:
        piece = pieces[number]
        ctypes.memmove(rooms.slot_at(rank, slot), piece.data_ptr(), piece.nbytes)

    def read(number: int, slot: int) -> None:
        piece = pieces[number]
        parts = [piece if peer == rank else _head(slots[peer][slot], piece) for peer in range(count)]
        _combine(piece, parts, operator)

    writes = any(reader != rank for reader in readers)
    stream(shared, call, len(pieces), write if writes else pass_by, read if rank in readers else pass_by)


def _reduce_parts(shared: Shared, call: Call, flat: torch.Tensor, operator: Operator) -> None:
    """Each rank writes its pieces, combines its part of each, and reads the parts that others have combined."""
    rank, count, rooms = shared.rank, shared.num_ranks, shared.rooms
    slots, itemsize = rooms.slots(flat.dtype), flat.itemsize
    pieces = torch.split(flat, rooms.slot_bytes // itemsize)
    addresses = [piece.data_ptr() for piece in pieces]

    def write(number: int, slot: int) -> None:
        place, piece = rooms.slot_at(rank, slot), addresses[number]
        for peer, part in enumerate(_parts(len(pieces[number]), count, itemsize)):
            if peer != rank:
                ctypes.memmove(place + part.begin, piece + part.begin, part.num_bytes)

    def combine(number: int, slot: int) -> None:
        begin, end = _parts(len(pieces[number]), count, itemsize)[rank].elements
        own, place = pieces[number][begin:end], slots[rank][slot][begin:end]
        parts = [own if peer == rank else slots[peer][slot][begin:end] for peer in range(count)]
        _combine(place, parts, operator)
        copy_contiguous(place, own)

    def read(number: int, slot: int) -> None:
        piece = addresses[number]
        for peer, part in enumerate(_parts(len(pieces[number]), count, itemsize)):
            if peer != rank:
                ctypes.memmove(piece + part.begin, rooms.slot_at(peer, slot) + part.begin, part.num_bytes)

    stream(shared, call, len(pieces), write, combine, read)


class _Part(NamedTuple):
    """What one rank combines of a piece."""

    elements: tuple[int, int]
    """From which to which."""
    begin: int
    """The byte of the piece that it begins at."""
    num_bytes: int


@lru_cache(64)
def _parts(length: int, count: int, itemsize: int) -> tuple[_Part, ...]:
    """Returns the part of each rank, as torch.tensor_split makes them, of a piece of so many elements."""
    ends = list(accumulate(len(range(rank, length, count)) for rank in range(count)))
    begins = [0, *ends]
    return tuple(
        _Part((begin, end), begin * itemsize, (end - begin) * itemsize)
        for begin, end in zip(begins, ends, strict=False)
    )


def _reduce_shares(
    shared: Shared, call: Call, shares: Sequence[torch.Tensor], target: torch.Tensor, operator: Operator
) -> None:
    """Each rank writes pieces of the shares of all others, and combines what all have written for it.

    Args:
        shared: by the group.
        call: the operation.
        shares: what this rank has for each rank, flat; the first is the longest.
        target: for the result, as long as this rank's share.
        operator: see there.
    """
    rank, count, rooms = shared.rank, shared.num_ranks, shared.rooms
    size = rooms.slot_bytes // target.itemsize // (count - 1) // _ALIGNMENT * _ALIGNMENT  # of each share, in a slot
    width = size * target.itemsize
    slots = rooms.slots(target.dtype)
    shown = [
        (_lane(rank, peer) * width, share.data_ptr(), share.nbytes) for peer, share in enumerate(shares) if peer != rank
    ]

    def place(owner: int, slot: int, length: int) -> torch.Tensor:
        start = _lane(owner, rank) * size
        return slots[owner][slot][start : start + length]

    def write(piece: int, slot: int) -> None:
        begin = piece * width
        for start, share, num_bytes in shown:
            if begin < num_bytes:
                ctypes.memmove(rooms.slot_at(rank, slot) + start, share + begin, min(width, num_bytes - begin))

    def read(piece: int, slot: int) -> None:
        here, own = (flat[piece * size : (piece + 1) * size] for flat in (target, shares[rank]))
        if len(here):
            own = here if own.data_ptr() == here.data_ptr() else own  # `out` may be where the share is
            parts = [own if peer == rank else place(peer, slot, len(here)) for peer in range(count)]
            _combine(here, parts, operator)

    stream(shared, call, -(-len(shares[0]) // size), write, read)


def _lane(owner: int, reader: int) -> int:
    """Returns the place of a reader's share among those that a rank shows."""
    return reader - (reader > owner)


def _head(slot: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """Returns as much of a slot as a piece needs."""
    return slot if slot.shape == piece.shape else slot[: len(piece)]


def _combine(target: torch.Tensor, parts: Sequence[torch.Tensor], operator: Operator) -> None:
    """Writes into `target` what the parts are combined to in their order; it may be one of them."""
    dtype = target.dtype
    wide = accumulation_dtype(dtype)
    if wide is dtype and len(parts) == 2 and not operator.divides:  # quickly what is called the most
        operator.function(parts[0], parts[1], out=target)
        return
    first, second, *others = parts
    if wide is dtype and not (others and any(part is target for part in others)):
        function = operator.function
        function(first, second, out=target)
        for part in others:
            function(target, part, out=target)
        if operator.divides:
            operator.finish(target, len(parts))
        return
    total = first.to(wide, copy=True)
    for part in (second, *others):
        operator.combine(total, part.to(wide))
    target.copy_(operator.finish(total, len(parts)))


def _write_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
