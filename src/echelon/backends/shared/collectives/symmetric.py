"""Symmetric memory: tensors that every rank of a group can read and write in place.

Strategy. All ranks of a group allocate together. Its first rank allocates a block of the segment with a part for each
rank, and all map the block. A rank's tensor is a view of its own part, mapped a second time. When nothing refers to
this second mapping any more, the rank forgets the block and returns the part's memory to the system. It asks nobody:
peers touch a part only in an operation in which its rank announced a tensor of it, and no rank leaves such an operation
before all are done with it.

An operation works in place only if all tensors that it reaches lie in blocks that every rank still maps. A rank maps
the block of its own tensor, and announces a bitmap of the recent blocks that it maps. All see all announcements, so all
decide alike.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from echelon.backends.shared.collectives.sync_block import SyncBlock
from echelon.backends.shared.memory.segment import Segment, Window
from echelon.errors import ProtocolError, UnsupportedOp
from echelon.operation_records import OperationRecord

# Views per block: operations repeat the same tensors.
_MAX_CACHED = 64
# Recent blocks in the bitmap: as many as a 64-bit word has bits, but one.
_NUM_REMEMBERED = 63


class _Block:
    """One symmetric allocation of the group."""

    def __init__(self, window: Window, part_bytes: int, own: int) -> None:
        self.window = window
        self.part_bytes = part_bytes
        self.own = own
        """Offset of this rank's part in the window."""
        self.views: dict[tuple[int, int, int], torch.Tensor] = {}

    def part(self, rank: int, start: int, num_bytes: int) -> torch.Tensor:
        """Returns bytes of a rank's part.

        Raises:
            ProtocolError: the rank announced bytes outside its part.
        """
        key = (rank, start, num_bytes)
        view = self.views.get(key)
        if view is None:
            # A peer announced the offset: it is checked against the part before it is used.
            if start + num_bytes > self.part_bytes:
                raise ProtocolError(
                    f"rank {rank} announced {num_bytes} bytes at {start}, outside its {self.part_bytes}"
                )
            if len(self.views) >= _MAX_CACHED:
                self.views.clear()
            begin = rank * self.part_bytes + start
            view = self.views[key] = self.window.data[begin : begin + num_bytes]
        return view


class SymmetricView(NamedTuple):
    """Blocks that a rank maps during an operation, and the position of its own tensor, as announced."""

    blocks: Mapping[int, _Block]
    """By number. The references keep the blocks mapped until the operation ends, even if tensors die meanwhile."""
    num_blocks: int = 0
    """Blocks allocated so far, the same on all ranks."""
    words: tuple[int, ...] = ()
    """The number of the tensor's block, 0 for ordinary memory; the tensor's offset in the rank's part; a bitmap of the
    recent blocks that the rank maps. Empty if the group never had a block."""

    @property
    def has_tensor(self) -> bool:
        """Whether the rank's own tensor is in a block."""
        return bool(self.words and self.words[0])

    def everywhere(self, announced: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[torch.Tensor] | None:
        """Returns the bytes of all ranks' tensors. None if a rank cannot reach one of them.

        Args:
            announced: the words of each rank.
            sizes: the bytes of each rank's tensor. One without any need not be reached.

        Raises:
            ProtocolError: a rank announced bytes outside its part.
        """
        if not all(self._all_have(words[0], announced) for words, size in zip(announced, sizes, strict=True) if size):
            return None
        return [
            self.blocks[words[0]].part(rank, words[1], size) if size else _NOTHING
            for rank, (words, size) in enumerate(zip(announced, sizes, strict=True))
        ]

    def _all_have(self, number: int, announced: Sequence[Sequence[int]]) -> bool:
        """Whether every rank still maps the block (own tensor, or recent-block bitmap)."""
        if not number:
            return False
        if all(words[0] == number for words in announced):
            return True
        # An older block's bit stands for a newer block by now: bits are reused after 63 blocks.
        is_late = number > self.num_blocks - _NUM_REMEMBERED
        return is_late and all(words[2] >> number % _NUM_REMEMBERED & 1 for words in announced)


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class SymmetricMemory:
    """Symmetric blocks of one group in which this rank has a live tensor."""

    def __init__(self, segment: Segment, rank: int, num_ranks: int) -> None:
        self._segment = segment
        self._rank = rank
        self._num_ranks = num_ranks
        self.count = 0
        """Blocks allocated so far, the same on all ranks."""
        self._process = os.getpid()
        self._blocks: dict[int, _Block] = {}
        # This rank's parts in order of address: begin and end in this process, and the block's number.
        self._starts: list[tuple[int, int, int]] = []

    def allocate(
        self, board: SyncBlock, call: OperationRecord, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Returns a new tensor with undefined values. Collective: blocks until all ranks have called it.

        Raises:
            UnsupportedOp: there is no memory for it.
        """
        size = torch.Size(shape).numel() * dtype.itemsize
        part_bytes = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        first = self._rank == 0
        board.meet(call, [self._segment.allocate(part_bytes * self._num_ranks) if first else 0])
        offset = board.word(0, 0)
        self.count += 1
        window = self._segment.map(offset, part_bytes * self._num_ranks)
        own = self._rank * part_bytes
        # Reserves the pages now: without memory for one, its first write would be a SIGBUS instead of an error.
        try:
            os.posix_fallocate(self._segment.fd, offset + own, part_bytes)
        except OSError as error:
            raise UnsupportedOp(
                f"no memory for a shared tensor of {size} bytes: {error.strerror}: free some"
            ) from error
        # A second mapping, whose end tells that no tensor or view refers to the part any more. The window stays in the
        # block.
        part = self._segment.map(offset + own, part_bytes)
        block = self._blocks[self.count] = _Block(window, part_bytes, own)
        entry = (part.address, part.address + part_bytes, self.count)
        self._starts = sorted([*self._starts, entry])
        weakref.finalize(part.memory, self._forget, self.count, entry, block).atexit = False
        return part.data[:size].view(dtype).view(tuple(shape))

    def reach(self, tensor: torch.Tensor | None) -> SymmetricView:
        """Returns the view to announce for an operation on a contiguous tensor, or on none."""
        # Fast path: most groups never allocate symmetric memory, and announce nothing.
        if not self.count:
            return SymmetricView({})
        # A copy, as tensors may die in any thread during the operation.
        blocks = self._blocks.copy()
        oldest = self.count - _NUM_REMEMBERED
        held = sum(1 << number % _NUM_REMEMBERED for number in blocks if number > oldest)
        return SymmetricView(blocks, self.count, (*self._spot(tensor), held))

    def _spot(self, tensor: torch.Tensor | None) -> tuple[int, int]:
        """Returns a tensor's block number and its offset in this rank's part. Zeros for ordinary memory."""
        # Read once: `_forget` replaces the list in any thread and never changes it.
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
        """Releases a part when nothing refers to this rank's tensor any more, in any thread."""
        if os.getpid() != self._process:
            return  # a forked child dropped its private copy; the parent still has the tensor
        self._blocks.pop(number, None)
        self._starts = [other for other in self._starts if other != entry]
        block.window.memory.madvise(mmap.MADV_REMOVE, block.own, block.part_bytes)
