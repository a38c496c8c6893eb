"""Tensors that live where every rank of a group can read and write them.

Strategy. All ranks of a group allocate together: its first rank gives out a block of the segment with a part for each,
and all map it. A rank's tensor is a view of its own part, mapped a second time; when nothing refers to that any more,
the rank forgets the block and gives the part's memory back. It does so alone: peers touch a part only within an
operation in which its rank announced a tensor of it, and no rank leaves such an operation before all are done with it.

An operation takes the short way only if all tensors that it is to reach lie in blocks that every rank still has
mapped: a rank has the block of its own tensor, and announces which of the last ones it has. All see all announcements,
so all decide alike.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from echelon.backends.native import Call
from echelon.backends.shared.collectives.sync_block import SyncBlock
from echelon.backends.shared.memory.segment import Segment, Window
from echelon.errors import ProtocolError, UnsupportedOp

_MAX_CACHED = 64
_NUM_REMEMBERED = 63
"""How many of the last blocks a rank can say that it has: as many as a word has bits, but one."""


class _Block:
    """One allocation of the group."""

    def __init__(self, window: Window, part_bytes: int, own: int) -> None:
        self.window = window
        self.part_bytes = part_bytes
        self.own = own
        """Where this rank's part begins in the window."""
        self.views: dict[tuple[int, int, int], torch.Tensor] = {}

    def part(self, rank: int, start: int, num_bytes: int) -> torch.Tensor:
        """Returns bytes of a rank's part.

        Raises:
            ProtocolError: it does not have so many; the rank announced a place that there is not.
        """
        key = (rank, start, num_bytes)
        view = self.views.get(key)
        if view is None:
            if start + num_bytes > self.part_bytes:
                raise ProtocolError(f"rank {rank} announced {num_bytes} bytes at {start}, of {self.part_bytes}")
            if len(self.views) >= _MAX_CACHED:
                self.views.clear()
            begin = rank * self.part_bytes + start
            view = self.views[key] = self.window.data[begin : begin + num_bytes]
        return view


class SymmetricView(NamedTuple):
    """Which blocks a rank has while it is in an operation, and where its own tensor is, as it announces them."""

    blocks: Mapping[int, _Block]
    """By number. Being here, they stay mapped until the end of the operation, whatever dies meanwhile."""
    num_blocks: int = 0
    """How many there have been, on all ranks."""
    words: tuple[int, ...] = ()
    """The number of the tensor's block, 0 for ordinary memory; how many bytes after the beginning of the rank's part
    the tensor is; a bit for each of the last blocks that the rank has. Nothing, if the group never had a block."""

    @property
    def has_tensor(self) -> bool:
        """Whether the rank's own tensor is in a block."""
        return bool(self.words and self.words[0])

    def everywhere(self, announced: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[torch.Tensor] | None:
        """Returns the bytes of the tensors of all ranks, if all ranks can reach them.

        Args:
            announced: the words of each rank.
            sizes: the bytes that each rank's tensor has; one without any need not be reached.

        Raises:
            ProtocolError: a rank announced a place that its part does not have.
        """
        if not all(self._all_have(words[0], announced) for words, size in zip(announced, sizes, strict=True) if size):
            return None
        return [
            self.blocks[words[0]].part(rank, words[1], size) if size else _NOTHING
            for rank, (words, size) in enumerate(zip(announced, sizes, strict=True))
        ]

    def _all_have(self, number: int, announced: Sequence[Sequence[int]]) -> bool:
        """Says whether all have a block: their own tensors are in it, or it is one of the last, and all say so."""
        if not number:
            return False
        if all(words[0] == number for words in announced):
            return True
        is_late = number > self.num_blocks - _NUM_REMEMBERED
        return is_late and all(words[2] >> number % _NUM_REMEMBERED & 1 for words in announced)


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class SymmetricMemory:
    """The blocks of one group in which this rank has a tensor."""

    def __init__(self, segment: Segment, rank: int, num_ranks: int) -> None:
        self._segment = segment
        self._rank = rank
        self._num_ranks = num_ranks
        self.count = 0
        """How many blocks there have been; the same on all ranks."""
        self._process = os.getpid()
        self._blocks: dict[int, _Block] = {}
        self._starts: list[tuple[int, int, int]] = []
        """Of each of this rank's parts, in order: where it begins and ends in this process, and the block's number."""

    def allocate(self, board: SyncBlock, call: Call, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
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
        self.count += 1
        window = self._segment.map(offset, part_bytes * self._num_ranks)
        own = self._rank * part_bytes
        try:
            os.posix_fallocate(self._segment.fd, offset + own, part_bytes)
        except OSError as error:
            raise UnsupportedOp(f"no memory for a shared tensor of {size} bytes ({error.strerror})") from error
        part = self._segment.map(offset + own, part_bytes)
        block = self._blocks[self.count] = _Block(window, part_bytes, own)
        entry = (part.address, part.address + part_bytes, self.count)
        self._starts = sorted([*self._starts, entry])
        weakref.finalize(part.memory, self._forget, self.count, entry, block).atexit = False
        return part.data[:size].view(dtype).view(tuple(shape))

    def reach(self, tensor: torch.Tensor | None) -> SymmetricView:
        """Returns what this rank announces for an operation on a contiguous tensor, None where it has none."""
        if not self.count:
            return SymmetricView({})
        blocks = self._blocks.copy()
        oldest = self.count - _NUM_REMEMBERED
        held = sum(1 << number % _NUM_REMEMBERED for number in blocks if number > oldest)
        return SymmetricView(blocks, self.count, (*self._spot(tensor), held))

    def _spot(self, tensor: torch.Tensor | None) -> tuple[int, int]:
        """Returns the number of a tensor's block and how many bytes after this rank's part begins it is there."""
        starts = self._starts
        if tensor is None or not starts:
            return 0, 0
        address = tensor.data_ptr()
        index = bisect_right(starts, (address, 1 << 64, 0)) - 1
        if index < 0 or address + tensor.nbytes > starts[index][1]:
            return 0, 0
        begin, _, number = starts[index]
        return number, address - begin

    def _forget(self, number: int, entry: tuple[int, int, int], block: _Block) -> None:
        """Called when nothing refers to this rank's tensor any more, in whatever thread."""
        if os.getpid() != self._process:
            return  # a forked child lets go of its copy, not the parent of its memory
        self._blocks.pop(number, None)
        self._starts = [other for other in self._starts if other != entry]
        block.window.memory.madvise(mmap.MADV_REMOVE, block.own, block.part_bytes)
