"""Image of a rank's file, copied out of its tensors."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.checkpoint.files.blocks import RING
from echelon.checkpoint.files.layout import DTYPES, Entry, FileLayout, Part
from echelon.checkpoint.files.manifest import BLOCK
from echelon.checkpoint.state import Piece, Spec
from echelon.errors import UnsupportedOp


def entry_of(name: str, spec: Spec) -> Entry:
    """Returns a tensor's dtype and shape as the manifest has them.

    Raises:
        UnsupportedOp: the dtype cannot be stored.
    """
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedOp(f"{name} has the dtype {spec.dtype}, which no checkpoint holds: convert it")
    return Entry(dtype, tuple(spec.shape))


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of a name in the manifest."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class Copy(NamedTuple):
    """Elements [first, last) of a piece, which lie at byte `begin` of the file."""

    piece: int
    first: int
    last: int
    begin: int


def copies_of(layout: FileLayout, pieces: Sequence[Part]) -> list[Copy]:
    """Returns where the bytes of a file come from, in their order. `pieces`: the ranges that the rank holds."""
    by_name: dict[str, list[tuple[int, int, int]]] = {}
    for number, (name, start, stop) in enumerate(pieces):
        by_name.setdefault(name, []).append((start, stop, number))
    for ranges in by_name.values():
        ranges.sort()
    copies = []
    for (name, start, stop), begin, end in layout.placed:
        if start == stop:  # a tensor without elements has a name in the header alone
            continue
        size = (end - begin) // (stop - start)
        position = start
        for first, last, number in by_name[name]:
            if first <= position < last:
                upto = min(last, stop)
                copies.append(Copy(number, position - first, upto - first, begin + (position - start) * size))
                position = upto
    return copies


def fill(memory: Tensor, layout: FileLayout, copies: Iterable[Copy], pieces: Sequence[Piece]) -> None:
    """Copies a file's header and tensors into memory of its size."""
    memory[: len(layout.header)].copy_(_tensor_of(layout.header))
    for number, first, last, begin in copies:
        source = _bytes_of(pieces[number].values, first, last)
        memory[begin : begin + len(source)].copy_(source)


def blocks(layout: FileLayout, copies: Iterable[Copy], pieces: Sequence[Piece]) -> Iterator[memoryview]:
    """Yields the blocks of a file. Each is overwritten when a few more have been asked for."""
    ring = mmap.mmap(-1, RING * BLOCK)  # pages, so that a disk can be written to without a copy
    memory, view = torch.frombuffer(ring, dtype=torch.uint8), memoryview(ring)
    number, used = 0, 0
    for source in _sources(layout, copies, pieces):
        done = 0
        while done < len(source):
            begin, count = number % RING * BLOCK, min(BLOCK - used, len(source) - done)
            memory[begin + used : begin + used + count].copy_(source[done : done + count])
            done, used = done + count, used + count
            if used == BLOCK:
                yield view[begin : begin + BLOCK]
                number, used = number + 1, 0
    if used:
        yield view[number % RING * BLOCK :][:used]


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor, as a view of its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _sources(layout: FileLayout, copies: Iterable[Copy], pieces: Sequence[Piece]) -> Iterator[Tensor]:
    yield _tensor_of(layout.header)
    for number, first, last, _ in copies:
        # One tensor at a time comes from another device.
        yield _bytes_of(pieces[number].values, first, last).cpu()


def _bytes_of(values: Tensor, first: int, last: int) -> Tensor:
    flat = values.detach().resolve_conj().resolve_neg().reshape(-1)[first:last]
    return flat.contiguous().view(torch.uint8)  # one dim with gaps is flat already, and is not copied before


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)  # torch warns of bytes, which it must not change
