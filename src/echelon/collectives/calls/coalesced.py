"""Collectives on many tensors at once: packed into one, so that there are as many messages as for one.

What is combined is packed by dtype, an operation for each; what is gathered is packed as bytes, whatever the dtypes,
with the number of rows of each tensor in front.
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

_ALIGNMENT = 16
"""Bytes at whose multiples every tensor begins, so that it can be looked at as its dtype."""
_NAMED = 3
"""How many tensors a note describes."""


_Step: TypeAlias = tuple[Callable[[], Operation[Tensor]], Callable[[Tensor], None]]
"""What makes the operation on the packed tensors, and what unpacks its result."""


def all_reduce_coalesced(tensors: Sequence[Tensor], op: str) -> list[Operation[None]]:
    """Combines each tensor over all ranks, in place; an operation for each dtype."""
    op = check_op(op)
    return _in_place(f"all_reduce_coalesced({op})", tensors, op, lambda packed: all_reduce(packed, op))


def reduce_coalesced(tensors: Sequence[Tensor], dst: int, op: str, is_dst: bool) -> list[Operation[None]]:
    """Combines each tensor over all ranks, in place on rank `dst`; an operation for each dtype."""
    op = check_op(op)
    name = f"reduce_coalesced({op}, dst={dst})"
    return _in_place(name, tensors, op, lambda packed: reduce(packed, dst, op), keeps=is_dst)


def reduce_scatter_coalesced(
    tensors: Sequence[Tensor], op: str, rank: int, num_ranks: int, results: list[Tensor]
) -> list[Operation[None]]:
    """Combines each tensor over all ranks, and puts this rank's part of each in `results`."""
    op = check_op(op)
    results[:] = tensors

    def part_of(chosen: Sequence[int]) -> _Step:
        shapes = [tensors[number].tensor_split(num_ranks)[rank].shape for number in chosen]

        def pack() -> Operation[Tensor]:
            splits = [plain(tensors[number]).tensor_split(num_ranks) for number in chosen]
            parts = [torch.cat([part.reshape(-1) for part in parts]) for parts in zip(*splits, strict=True)]
            return reduce_scatter(pad_sequence(parts, batch_first=True), op)

        def unpack(packed: Tensor) -> None:
            begin = 0
            for number, shape in zip(chosen, shapes, strict=True):
                results[number] = packed[0, begin : begin + shape.numel()].view(shape)
                begin += shape.numel()

        return pack, unpack

    return _for_each_dtype(f"reduce_scatter_coalesced({op}) of {_describe_all(tensors)}", tensors, op, part_of)


def all_gather_coalesced(tensors: Sequence[Tensor]) -> Operation[list[Tensor]]:
    """Returns for each tensor those of all ranks, concatenated along dim 0."""
    own = _rows_of(tensors)
    note = f"all_gather_coalesced of rows of {_describe_rows(own)}"
    return derived(lambda: rows.all_gather(_pack(own)), lambda came: _unpack(came, own), note, _num_bytes(own))


def gather_coalesced(tensors: Sequence[Tensor], dst: int) -> Operation[list[Tensor] | None]:
    """Returns what `all_gather_coalesced` does on rank `dst`, and None on others."""
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
    """Returns an operation for the tensors of each dtype; one that only meets, if there are no tensors."""
    numbers: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        numbers.setdefault(tensor.dtype, []).append(number)
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
    """Returns what ranks compare: the first few in words, all of them as a digest."""
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
    """Returns the numbers of rows, then the bytes of all tensors, each at a multiple of the alignment."""
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
    """Returns for each tensor the rows that the packs have, concatenated; `like` says of which kind they are."""
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
