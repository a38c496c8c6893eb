"""Collectives on many tensors, packed into one: as many messages as for one tensor.

Reductions pack tensors of equal dtype, and run one operation per dtype. Gathers pack the bytes of all dtypes together,
after the number of rows of each tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from echelon.backends.admission import stands_for_device
from echelon.backends.collective import Collective
from echelon.backends.memory import describe, is_plain, plain
from echelon.backends.modes import in_normal_mode, outside_autograd, overwrite
from echelon.backends.operators import check_op, operator

# Every packed tensor begins at a multiple of this many bytes, so that the bytes can be viewed as its dtype.
_ALIGNMENT = 16
# Number of tensors that a note describes in words.
_NAMED = 3


class Packed(NamedTuple):
    """Collective on a tensor that several values were packed into."""

    collective: Collective
    tensor: Tensor | None
    unpack: Callable[[Any], Any]
    """Maps the result of the collective to that of the values."""
    num_bytes: int | None = None
    """Bytes of the values. None: of the tensor."""


@in_normal_mode
def all_reduce_coalesced(tensors: Sequence[Tensor], op: str) -> list[Packed]:
    """Returns the collectives, one per dtype, that combine each tensor over all ranks, in place."""
    op = check_op(op)
    return _in_place("all_reduce", f"all_reduce_coalesced({op})", tensors, op)


@in_normal_mode
def reduce_coalesced(tensors: Sequence[Tensor], dst: int, op: str, is_dst: bool) -> list[Packed]:
    """Returns the collectives, one per dtype, that combine each tensor over all ranks, in place on rank `dst`."""
    op = check_op(op)
    return _in_place("reduce", f"reduce_coalesced({op}, dst={dst})", tensors, op, dst, keeps=is_dst)


@in_normal_mode
def reduce_scatter_coalesced(
    tensors: Sequence[Tensor], op: str, rank: int, num_ranks: int, results: list[Tensor]
) -> list[Packed]:
    """Returns the collectives, one per dtype, that combine each tensor and store this rank's part in `results`."""
    op = check_op(op)
    # Fills the list to its length; every entry is overwritten.
    results[:] = tensors
    note = f"reduce_scatter_coalesced({op}) of {_describe_all(tensors)}"

    def pack(chosen: Sequence[int], name: str) -> Packed:
        shapes = [tensors[number].tensor_split(num_ranks)[rank].shape for number in chosen]
        splits = [plain(tensors[number]).tensor_split(num_ranks) for number in chosen]
        parts = [torch.cat([part.reshape(-1) for part in parts]) for parts in zip(*splits, strict=True)]

        def unpack(part: Tensor) -> None:
            begin = 0
            for number, shape in zip(chosen, shapes, strict=True):
                results[number] = part[0, begin : begin + shape.numel()].view(shape)
                begin += shape.numel()

        # One row per rank. Ranks' parts may differ in size, so shorter rows are padded.
        packed = pad_sequence(parts, batch_first=True)
        collective = Collective("reduce_scatter", packed.shape, packed.dtype, op, name=name)
        return Packed(collective, packed, unpack, _num_bytes([tensors[number] for number in chosen]))

    return _for_each_dtype(note, tensors, op, pack)


@in_normal_mode
def all_gather_coalesced(tensors: Sequence[Tensor]) -> Packed:
    """Returns the collective that concatenates each tensor over all ranks along dim 0."""
    own = _rows_of(tensors)
    packed, name = _pack(own), f"all_gather_coalesced of rows of {_describe_rows(own)}"
    collective = Collective("all_gather", packed.shape, packed.dtype, name=name)
    return Packed(collective, packed, lambda came: _unpack(came, own), _num_bytes(own))


@in_normal_mode
def gather_coalesced(tensors: Sequence[Tensor], dst: int) -> Packed:
    """Returns the collective that concatenates each tensor over all ranks, on rank `dst` only. None on other ranks."""
    own = _rows_of(tensors)
    packed, name = _pack(own), f"gather_coalesced(dst={dst}) of rows of {_describe_rows(own)}"
    collective = Collective("gather", packed.shape, packed.dtype, root=dst, name=name)
    return Packed(collective, packed, lambda came: None if came is None else _unpack(came, own), _num_bytes(own))


def _in_place(
    kind: str, name: str, tensors: Sequence[Tensor], op: str, root: int = -1, keeps: bool = True
) -> list[Packed]:
    def pack(chosen: Sequence[int], name: str) -> Packed:
        values = [tensors[number] for number in chosen]
        # One tensor is reduced in place, without packing.
        is_packed = len(values) > 1 or not is_plain(values[0])
        packed = torch.cat([plain(value).view(-1) for value in values]) if is_packed else outside_autograd(values[0])

        def unpack(packed: Tensor) -> None:
            if is_packed and keeps:
                parts = torch.split(packed, [value.numel() for value in values])
                for value, part in zip(values, parts, strict=True):
                    overwrite(value, part.view(value.shape))

        return Packed(Collective(kind, packed.shape, packed.dtype, op, root, name=name), packed, unpack)

    return _for_each_dtype(f"{name} of {_describe_all(tensors)}", tensors, op, pack)


def _for_each_dtype(
    note: str, tensors: Sequence[Tensor], op: str, pack: Callable[[Sequence[int], str], Packed]
) -> list[Packed]:
    """Returns one collective per dtype. A barrier if there are no tensors, so that ranks still compare the call."""
    numbers: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        numbers.setdefault(tensor.dtype, []).append(number)
    # An unsupported dtype raises here, before the first one is packed.
    for dtype in numbers:
        operator(op, dtype)
    if not numbers:
        return [Packed(Collective("barrier", name=note), None, lambda _: None)]
    return [pack(chosen, f"{note}, {describe((), dtype)[:-2]}") for dtype, chosen in numbers.items()]


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


def _rows_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach() if tensor.dim() else tensor.detach().reshape(1) for tensor in tensors]


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


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
        if stands_for_device(packs):  # has no values: every rank is taken to have as many rows as this one
            counts = [len(each) for each in like]
        begin += _padded(8 * len(like))
        for number, (count, kind) in enumerate(zip(counts, like, strict=True)):
            size = count * _row_bytes(kind)
            parts[number].append(packs[begin : begin + size].view(kind.dtype).view(count, *kind.shape[1:]))
            begin += _padded(size)
    return [torch.cat(pieces) for pieces in parts]
