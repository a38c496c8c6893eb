"""Collectives on many tensors, packed into one: as many messages as for one tensor.

Reductions pack tensors of equal dtype, and run one operation per dtype. Gathers pack the bytes of all dtypes together,
after the number of rows of each tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from echelon.backends.memory import describe, plain
from echelon.backends.modes import overwrite
from echelon.backends.operators import check_op, operator
from echelon.collectives.calls import rows
from echelon.collectives.calls.operations import Operation, all_reduce, barrier, derived, reduce, reduce_scatter

# Every packed tensor begins at a multiple of this many bytes, so that the bytes can be viewed as its dtype.
_ALIGNMENT = 16
# Number of tensors that a note describes in words.
_NAMED = 3


# A function that packs tensors and returns the operation on the pack, and a function that unpacks its result.
_Step: TypeAlias = tuple[Callable[[], Operation[Tensor]], Callable[[Tensor], None]]


def all_reduce_coalesced(tensors: Sequence[Tensor], op: str) -> list[Operation[None]]:
    """Returns the operations, one per dtype, that combine each tensor over all ranks, in place."""
    op = check_op(op)
    return _in_place(f"all_reduce_coalesced({op})", tensors, op, lambda packed: all_reduce(packed, op))


def reduce_coalesced(tensors: Sequence[Tensor], dst: int, op: str, is_dst: bool) -> list[Operation[None]]:
    """Returns the operations, one per dtype, that combine each tensor over all ranks, in place on rank `dst`."""
    op = check_op(op)
    name = f"reduce_coalesced({op}, dst={dst})"
    return _in_place(name, tensors, op, lambda packed: reduce(packed, dst, op), keeps=is_dst)


def reduce_scatter_coalesced(
    tensors: Sequence[Tensor], op: str, rank: int, num_ranks: int, results: list[Tensor]
) -> list[Operation[None]]:
    """Returns the operations, one per dtype, that combine each tensor and store this rank's part in `results`."""
    op = check_op(op)
    # Fills the list to its length; every entry is overwritten.
    results[:] = tensors

    def part_of(chosen: Sequence[int]) -> _Step:
        shapes = [tensors[number].tensor_split(num_ranks)[rank].shape for number in chosen]

        def pack() -> Operation[Tensor]:
            splits = [plain(tensors[number]).tensor_split(num_ranks) for number in chosen]
            parts = [torch.cat([part.reshape(-1) for part in parts]) for parts in zip(*splits, strict=True)]
            # One row per rank. Ranks' parts may differ in size, so shorter rows are padded.
            return reduce_scatter(pad_sequence(parts, batch_first=True), op)

        def unpack(packed: Tensor) -> None:
            begin = 0
            for number, shape in zip(chosen, shapes, strict=True):
                results[number] = packed[0, begin : begin + shape.numel()].view(shape)
                begin += shape.numel()

        return pack, unpack

    return _for_each_dtype(f"reduce_scatter_coalesced({op}) of {_describe_all(tensors)}", tensors, op, part_of)


def all_gather_coalesced(tensors: Sequence[Tensor]) -> Operation[list[Tensor]]:
    """Returns the operation that concatenates each tensor over all ranks along dim 0."""
    own = _rows_of(tensors)
    note = f"all_gather_coalesced of rows of {_describe_rows(own)}"
    return derived(lambda: rows.all_gather(_pack(own)), lambda came: _unpack(came, own), note, _num_bytes(own))


def gather_coalesced(tensors: Sequence[Tensor], dst: int) -> Operation[list[Tensor] | None]:
    """Returns the operation that concatenates each tensor over all ranks, on rank `dst` only. None on other ranks."""
    own = _rows_of(tensors)

    def finish(came: Tensor | None) -> list[Tensor] | None:
        return None if came is None else _unpack(came, own)

    note = f"gather_coalesced(dst={dst}) of rows of {_describe_rows(own)}"
    return derived(lambda: rows.gather(_pack(own), dst), finish, note, _num_bytes(own))


def _in_place(
    name: str, tensors: Sequence[Tensor], op: str, make: Callable[[Tensor], Operation[Tensor]], keeps: bool = True
) -> list[Operation[None]]:
    def part_of(chosen: Sequence[int]) -> _Step:
        values = [tensors[number] for number in chosen]

        def pack() -> Operation[Tensor]:
            # One tensor is reduced in place, without packing, so `unpack` has nothing to do then.
            is_one = len(values) == 1
            return make(values[0] if is_one else torch.cat([plain(tensor).view(-1) for tensor in values]))

        def unpack(packed: Tensor) -> None:
            if len(values) > 1 and keeps:
                parts = torch.split(packed, [tensor.numel() for tensor in values])
                for tensor, part in zip(values, parts, strict=True):
                    overwrite(tensor, part.view(tensor.shape))

        return pack, unpack

    return _for_each_dtype(f"{name} of {_describe_all(tensors)}", tensors, op, part_of)


def _for_each_dtype(
    note: str, tensors: Sequence[Tensor], op: str, part_of: Callable[[Sequence[int]], _Step]
) -> list[Operation[None]]:
    """Returns one operation per dtype. A barrier if there are no tensors, so that ranks still compare the call."""
    numbers: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        numbers.setdefault(tensor.dtype, []).append(number)
    # An unsupported dtype raises here, before the first operation is made.
    for dtype in numbers:
        operator(op, dtype)
    if not numbers:
        return [barrier()._replace(note=note)]
    operations = []
    for dtype, chosen in numbers.items():
        pack, unpack = part_of(chosen)
        num_bytes = _num_bytes([tensors[number] for number in chosen])
        operations.append(derived(pack, unpack, f"{note}, {describe((), dtype)[:-2]}", num_bytes))
    return operations


def _describe_all(tensors: Sequence[Tensor]) -> str:
    return _summary([describe(tensor.shape, tensor.dtype) for tensor in tensors])


def _describe_rows(tensors: Sequence[Tensor]) -> str:
    return _summary([describe(tensor.shape[1:], tensor.dtype) for tensor in tensors])


def _summary(texts: Sequence[str]) -> str:
    """Returns the text that ranks compare: the first 3 tensors in words, and a digest of all."""
    # A note travels with every message, so its length must not grow with the number of tensors.
    named = ", ".join(texts[:_NAMED])
    if len(texts) <= _NAMED:
        return f"{len(texts)} tensors: {named}" if texts else "0 tensors"
    digest = hashlib.blake2b("\n".join(texts).encode(), digest_size=4).hexdigest()
    return f"{len(texts)} tensors: {named} and others ({digest})"


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _rows_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach() if tensor.dim() else tensor.detach().reshape(1) for tensor in tensors]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _row_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.itemsize


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the row counts, then the bytes of all tensors, each at a multiple of the alignment."""
    head = _padded(8 * len(tensors))
    packed = torch.zeros(head + sum(_padded(tensor.nbytes) for tensor in tensors), dtype=torch.uint8, device="cpu")
    counts = torch.tensor([len(tensor) for tensor in tensors], dtype=torch.int64, device="cpu")
    packed[: 8 * len(tensors)].view(torch.int64).copy_(counts)
    begin = head
    for tensor in tensors:
        if tensor.numel():
            packed[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        begin += _padded(tensor.nbytes)
    return packed


def _unpack(packs: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns each tensor's rows from all packs, concatenated. `like` gives their dtypes and row shapes."""
    begin = 0
    parts: list[list[Tensor]] = [[] for _ in like]
    while begin < len(packs):
        counts = packs[begin : begin + 8 * len(like)].view(torch.int64).tolist()
        begin += _padded(8 * len(like))
        for number, (count, kind) in enumerate(zip(counts, like, strict=True)):
            size = count * _row_bytes(kind)
            parts[number].append(packs[begin : begin + size].view(kind.dtype).view(count, *kind.shape[1:]))
            begin += _padded(size)
    return [torch.cat(pieces) for pieces in parts]
