"""Tensors that live where every rank of a group can read and write them.

Strategy. All ranks of a group allocate together: its first rank gives out a block of the segment with a part for each,
and all map it. A rank's tensor is a view of its own part, mapped a second time; when nothing refers to that any more,
the rank forgets the block and gives the part's memory back. It does so alone: peers touch a part only within an
operation in which its rank announced a tensor of it, and no rank leaves such an operation before all are done with it.

An operation takes the short way only if every rank announced a tensor of one and the same block; then every rank holds
its part, so all have the block mapped. All see all announcements, so all decide alike.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch

from echelon.backends.native import Call
from echelon.backends.shared.board import Board
from echelon.backends.shared.segment import Segment, Window
from echelon.errors import ProtocolError, UnsupportedOp

_MAX_CACHED = 64


class Spot(NamedTuple):
    """Where a tensor is: the number of its block, 0 for ordinary memory, and how many bytes after its part begins."""

    block: int = 0
    start: int = 0


class _Block:
    """One allocation of the group."""

    def __init__(self, window: Window, part_bytes: int, own: int) -> None:
        self.window = window
        self.part_bytes = part_bytes
        self.own = own
        """Where this rank's part begins in the window."""
        self.views: dict[tuple[object, ...], list[torch.Tensor]] = {}


class SymmetricMemory:
    """The blocks of one group in which this rank has a tensor."""

    def __init__(self, segment: Segment, rank: int, num_ranks: int) -> None:
        self._segment = segment
        self._rank = rank
        self._num_ranks = num_ranks
        self._count = 0
        self._process = os.getpid()
        self._blocks: dict[int, _Block] = {}
        self._starts: list[tuple[int, int, int]] = []
        """Of each of this rank's parts, in order: where it begins and ends in this process, and the block's number."""

    def allocate(self, board: Board, call: Call, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a new tensor, its values undefined; all ranks call this.

        Raises:
            UnsupportedOp: there is no memory for it.
        """
        size = torch.Size(shape).numel() * dtype.itemsize
        part_bytes = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        first = self._rank == 0
        board.announce(call, [self._segment.allocate(part_bytes * self._num_ranks) if first else 0])
        board.meet(call)
        offset = board.word(0, 0)
        self._count += 1
        window = self._segment.map(offset, part_bytes * self._num_ranks)
        own = self._rank * part_bytes
        try:
            os.posix_fallocate(self._segment.fd, offset + own, part_bytes)
        except OSError as error:
            raise UnsupportedOp(f"no memory for a shared tensor of {size} bytes ({error.strerror})") from error
        part = self._segment.map(offset + own, part_bytes)
        block = self._blocks[self._count] = _Block(window, part_bytes, own)
        entry = (part.address, part.address + part_bytes, self._count)
        self._starts = sorted([*self._starts, entry])
        weakref.finalize(part.memory, self._forget, self._count, entry, block).atexit = False
        return part.data[:size].view(dtype).view(tuple(shape))

    def spot(self, tensor: torch.Tensor) -> Spot:
        """Returns where a contiguous tensor is."""
        if not self._starts:
            return Spot()
        address = tensor.data_ptr()
        starts = self._starts
        number = bisect_right(starts, (address, 1 << 64, 0)) - 1
        if number < 0 or address + tensor.nbytes > starts[number][1]:
            return Spot()
        return Spot(starts[number][2], address - starts[number][0])

    def everywhere(self, spots: Sequence[Spot], like: torch.Tensor) -> list[torch.Tensor] | None:
        """Returns the flat tensors of all ranks, if all are in one block; `like` is this rank's.

        Raises:
            ProtocolError: a rank announced a place that its part does not have.
        """
        number = spots[self._rank].block
        if not number or any(spot.block != number for spot in spots):
            return None
        block = self._blocks[number]
        key = (*spots, like.nbytes, like.dtype)
        views = block.views.get(key)
        if views is None:
            if any(spot.start + like.nbytes > block.part_bytes for spot in spots):
                raise ProtocolError(f"a rank announced {like.nbytes} bytes at {spots}, of parts of {block.part_bytes}")
            if len(block.views) >= _MAX_CACHED:
                block.views.clear()
            starts = [rank * block.part_bytes + spot.start for rank, spot in enumerate(spots)]
            views = [block.window.data[start : start + like.nbytes].view(like.dtype) for start in starts]
            block.views[key] = views
        return views

    def _forget(self, number: int, entry: tuple[int, int, int], block: _Block) -> None:
        """Called when nothing refers to this rank's tensor any more, in whatever thread."""
        if os.getpid() != self._process:
            return  # a forked child lets go of its copy, not the parent of its memory
        self._blocks.pop(number, None)
        self._starts = [other for other in self._starts if other != entry]
        block.window.memory.madvise(mmap.MADV_REMOVE, block.own, block.part_bytes)
