"""Collectives that reduce: all_reduce, reduce and reduce_scatter.

Values are combined in rank order on every rank, so all get the same bits. 8- and 16-bit floats are combined as float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from echelon.backends.collective import result_buffer
from echelon.backends.formats import memory_layout
from echelon.backends.memory import copy_contiguous
from echelon.backends.operators import OP_NUMBERS, Operator, combine_in_order
from echelon.backends.shared.collectives import streaming
from echelon.backends.shared.collectives.exchange import exit_barrier, meet_with
from echelon.backends.shared.collectives.rank_region import Shared
from echelon.operation_records import OperationRecord

# Amount combined and written at a time, so that it stays in the cache. With 4 ranks 128 and 512 KiB were 0.98 and 0.91
# times as fast.
_SLICE_BYTES = 256 << 10
# In elements: slices begin at multiples of it.
_ALIGNMENT = 64


def small_all_reduce(
    operator: Operator, shared: Shared, call: OperationRecord, tensor: torch.Tensor, _: torch.Tensor | None
) -> torch.Tensor:
    """Reduces a tensor of at most 256 KiB over all ranks, in place. One meeting.

    Each rank reduces all inputs. If cores are short, the first publishes a result of up to 2 KiB, for ranks that get a
    core later.
    """
    # Fast path: copies, meeting and sum are one call of the native library.
    op = OP_NUMBERS.get(operator.name)
    if op is not None and shared.board.all_reduce(call, op, tensor.nbytes, tensor):
        return tensor
    small = shared.rooms.small(call.sequence, tensor.shape, tensor.dtype)
    small.write(tensor)
    shared.board.meet(call)
    if tensor.is_contiguous():
        combine_in_order(tensor, small.places, operator)
    else:
        # Contiguous first, as on the other ranks: element by element torch gives other bits of NaN, of the smaller of
        # 0.0 and -0.0, and of complex products.
        total = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        combine_in_order(total, small.places, operator)
        tensor.copy_(total)
    return tensor


def large_all_reduce(
    operator: Operator, shared: Shared, call: OperationRecord, tensor: torch.Tensor, _: torch.Tensor | None
) -> torch.Tensor:
    """Reduces a tensor of more than 256 KiB over all ranks, in place.

    It takes one meeting with 2 ranks for ordinary tensors up to 1 MiB. Larger symmetric tensors are reduced in place,
    larger ordinary ones in pieces through the slots.
    """
    flat = tensor.contiguous().view(-1)
    # With 4 ranks slots take 0.47 to 0.77 of the time.
    is_shown = flat.nbytes <= memory_layout.SHOWN_BYTES and shared.num_ranks == 2
    small = shared.rooms.small(call.sequence, flat.shape, flat.dtype) if is_shown else None
    everywhere, shown = meet_with(shared, call, flat, small)
    if everywhere is not None:
        _reduce_slices(shared, call, everywhere, operator)
    elif shown is not None:
        # One meeting: 1.20 and 1.22 times as fast for 512 KiB and 1 MiB. Two meetings, a half for each rank: 0.93.
        combine_in_order(flat, [flat if peer == shared.rank else place for peer, place in enumerate(shown)], operator)
    elif shared.num_ranks == 2:
        # Each rank reads all of the other's pieces. A half for each was 0.68 to 0.81 times as fast with 64 MiB.
        _reduce_pieces(shared, call, flat, operator, readers=(0, 1))
    else:
        program = streaming.parts(shared.rank, shared.num_ranks, shared.rooms.slot_bytes, flat.nbytes, flat.itemsize)
        streaming.play(shared, call, program, flat, flat, operator)
    return _written_back(flat, tensor)


def reduce(
    dst: int, operator: Operator, shared: Shared, call: OperationRecord, tensor: torch.Tensor, _: torch.Tensor | None
) -> torch.Tensor:
    """Reduces `tensor` over all ranks, in place on rank `dst`."""
    is_dst = shared.rank == dst
    op = OP_NUMBERS.get(operator.name)
    # Fast path, as in `small_all_reduce`. Nobody reads the data of `dst`.
    if op is not None and tensor.nbytes <= memory_layout.SMALL_BYTES:
        num_shown, target = (0, tensor) if is_dst else (tensor.nbytes, None)
        if shared.board.reduce(call, op, num_shown, tensor, 0, target):
            return tensor
    # One meeting up to 1 MiB: 1.3 to 2.3 times as fast as slots with ordinary tensors of 512 KiB and 1 MiB.
    if tensor.nbytes <= memory_layout.SHOWN_BYTES:
        own = tensor.contiguous() if is_dst else tensor  # the others' copy is the one that they publish
        _reduce_shown_to(shared, call, own, dst, operator)
        return _written_back(own, tensor)
    flat = tensor.contiguous().view(-1)
    everywhere = meet_with(shared, call, flat).everywhere
    if everywhere is None:
        # Rank `dst` combines all of it: a part for each of 4 ranks, which `dst` then reads, was 0.77 times as fast.
        _reduce_pieces(shared, call, flat, operator, readers=(dst,))
    else:
        _reduce_slices_to(shared, call, everywhere, dst, operator)
    return _written_back(flat, tensor) if is_dst else tensor


def reduce_scatter(
    operator: Operator, shared: Shared, call: OperationRecord, tensor: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """Reduces `tensor` over all ranks and returns this rank's part of dim 0, split as torch.tensor_split does."""
    rank, count = shared.rank, shared.num_ranks
    shape = (len(range(rank, len(tensor), count)), *tensor.shape[1:])  # as torch.tensor_split
    result = result_buffer(out, shape, tensor)
    if tensor.nbytes <= memory_layout.SMALL_BYTES:
        op = OP_NUMBERS.get(operator.name)
        # Fast path, as in `small_all_reduce`.
        if op is not None and shared.board.reduce(
            call, op, tensor.nbytes, tensor, begin_of(tensor.shape, tensor.nbytes, rank, count), result
        ):
            return result
        _show(shared, call, tensor)
        combine_in_order(result, shared.rooms.small_parts(call.sequence, tensor.shape, tensor.dtype)[rank], operator)
        return result
    parts = tensor.tensor_split(count)
    # With 4 ranks one meeting was 0.54 and 1.18 times as fast for 512 KiB and 1 MiB, so they use the slots.
    if count == 2 and tensor.nbytes <= memory_layout.SHOWN_BYTES:
        _exchange_halves(shared, call, parts, result, operator)
        return result
    everywhere = meet_with(shared, call, tensor.contiguous().view(-1)).everywhere
    if everywhere is not None:
        start = sum(part.numel() for part in parts[:rank])
        _combine_slice(result.view(-1), everywhere, start, operator)
        exit_barrier(shared, call)
        return result
    program = streaming.shares(rank, shared.rooms.slot_bytes, tuple(part.nbytes for part in parts), tensor.itemsize)
    streaming.play(shared, call, program, tensor.contiguous(), result, operator)
    return result


def begin_of(shape: torch.Size, num_bytes: int, rank: int, count: int) -> int:
    """Returns the offset of a rank's part of a contiguous tensor, in bytes, split as torch.tensor_split does."""
    num_rows = shape[0]
    if not num_rows:
        return 0
    rows, rest = divmod(num_rows, count)
    return (rank * rows + min(rank, rest)) * (num_bytes // num_rows)


def _reduce_shown_to(shared: Shared, call: OperationRecord, tensor: torch.Tensor, dst: int, operator: Operator) -> None:
    """Rank `dst` reduces the other ranks' data with its own."""
    is_reader = shared.rank == dst
    reads_own = is_reader and dst < 2  # from index 2 on, `combine_in_order` would need a copy
    places = _show(shared, call, tensor, writes=not reads_own)
    if is_reader:
        combine_in_order(
            tensor, [tensor if reads_own and peer == dst else place for peer, place in enumerate(places)], operator
        )


def _exchange_halves(
    shared: Shared, call: OperationRecord, halves: Sequence[torch.Tensor], result: torch.Tensor, operator: Operator
) -> None:
    """Two ranks: each writes the peer's half, then reduces its own."""
    rank = shared.rank
    own = halves[rank].contiguous()  # see `small_all_reduce`
    places = shared.rooms.small(call.sequence, own.shape, result.dtype).places
    shared.rooms.small(call.sequence, halves[1 - rank].shape, result.dtype).write(halves[1 - rank])
    shared.board.meet(call)
    combine_in_order(result, [own if peer == rank else place for peer, place in enumerate(places)], operator)


def _show(
    shared: Shared, call: OperationRecord, tensor: torch.Tensor, *, writes: bool = True
) -> Sequence[torch.Tensor]:
    """Writes this rank's tensor beside its announcement and blocks until all have. Returns the buffers of all ranks.

    writes: False if no peer reads this rank's data.
    """
    small = shared.rooms.small(call.sequence, tensor.shape, tensor.dtype)
    if writes:
        small.write(tensor)
    shared.board.meet(call)
    return small.places


def _reduce_slices(
    shared: Shared, call: OperationRecord, everywhere: Sequence[torch.Tensor], operator: Operator
) -> None:
    """Symmetric tensors: each rank reduces its slice of all of them in place, then writes it to all."""
    for parts in _pieces_of_slices(shared, everywhere):
        combine_in_order(parts[0], parts, operator)
        # Piece by piece, while it is in the cache.
        for part in parts[1:]:
            copy_contiguous(parts[0], part)
    exit_barrier(shared, call)


def _reduce_slices_to(
    shared: Shared, call: OperationRecord, everywhere: Sequence[torch.Tensor], dst: int, operator: Operator
) -> None:
    """Symmetric tensors: each rank reduces its slice into rank `dst`'s tensor. The others keep their values."""
    scratch = everywhere[0].new_empty(_SLICE_BYTES // everywhere[0].itemsize)
    for parts in _pieces_of_slices(shared, everywhere):
        total = scratch[: len(parts[0])]
        combine_in_order(total, parts, operator)
        copy_contiguous(total, parts[dst])
    exit_barrier(shared, call)


def _pieces_of_slices(shared: Shared, everywhere: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields this rank's slice of all tensors, in pieces that fit the cache."""
    size = -(-everywhere[0].numel() // shared.num_ranks // _ALIGNMENT) * _ALIGNMENT
    slices = [flat[shared.rank * size : (shared.rank + 1) * size] for flat in everywhere]
    pieces = zip(*(torch.split(part, _SLICE_BYTES // part.itemsize) for part in slices), strict=True)
    # The last ranks' slices are empty if the tensor has few elements.
    return (parts for parts in pieces if len(parts[0]))


def _combine_slice(target: torch.Tensor, everywhere: Sequence[torch.Tensor], start: int, operator: Operator) -> None:
    """Reduces the elements from `start` on of all tensors into `target`, piece by piece."""
    for piece in torch.split(target, _SLICE_BYTES // target.itemsize):
        if len(piece):
            combine_in_order(piece, [flat[start : start + len(piece)] for flat in everywhere], operator)
        start += len(piece)


def _reduce_pieces(
    shared: Shared, call: OperationRecord, flat: torch.Tensor, operator: Operator, readers: tuple[int, ...]
) -> None:
    """Streams pieces through the slots: each rank writes its own, and the `readers` reduce the pieces of all ranks."""
    program = streaming.pieces(
        shared.rank, shared.num_ranks, shared.rooms.slot_bytes, flat.nbytes, flat.itemsize, readers
    )
    streaming.play(shared, call, program, flat, flat, operator)


def _written_back(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if flat.data_ptr() == tensor.data_ptr() else tensor.copy_(flat.view(tensor.shape))
