"""How ranks show each other blocks of bytes of which only the owner knows the sizes before they meet.

Every rank writes beside its announcement how large its blocks are, and, if they fit, the blocks themselves. When all
have met, each knows all sizes, so all see alike which way the blocks go:

- those of all ranks have fit: they stand beside the announcements;
- all that were shown lie in memory that `group.empty` made, and that every rank still has: they are read where they
  are, and no rank leaves before all have read;
- else all go through the slots, piece by piece, every block in a lane of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch

from echelon.backends.native import Call
from echelon.backends.shared import layout
from echelon.backends.shared.room import Shared
from echelon.backends.shared.short_way import part_together
from echelon.backends.shared.streaming import pass_by, stream
from echelon.backends.shared.symmetric import Reach

_ALIGNMENT = 64


class Head(NamedTuple):
    """What a rank says of its blocks."""

    sizes: tuple[int, ...]
    """The bytes of each."""
    facts: tuple[int, ...]
    """Whatever else their readers need to know."""
    starts: tuple[int, ...]
    """Where each begins in the place for small data."""
    fits: bool
    """Whether they stand there."""


class Block(NamedTuple):
    """Block number `number` of rank `owner`."""

    owner: int
    number: int


Targets: TypeAlias = Mapping[Block, torch.Tensor]
"""Where a rank wants blocks of others to be copied to; as many bytes as the block has."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Blocks that all ranks have shown; to be read once by each rank, if only to read nothing."""

    shared: Shared
    call: Call
    own: Sequence[torch.Tensor]
    heads: tuple[Head, ...]
    """By rank."""
    reach: Reach
    """What this rank could reach when it announced its blocks."""

    @classmethod
    def meet(
        cls, shared: Shared, call: Call, whole: torch.Tensor | None, sizes: Sequence[int], facts: Sequence[int] = ()
    ) -> Exchange:
        """Shows this rank's blocks, and returns when all have shown theirs.

        Args:
            shared: by the group.
            call: the operation.
            whole: all blocks, one behind the other: a contiguous tensor of bytes; None: this rank has none.
            sizes: of the blocks, in bytes.
            facts: see `Head`.
        """
        rooms, number = shared.rooms, call.sequence
        head = _head(tuple(sizes), tuple(facts))
        reach = shared.symmetric.reach(whole)
        shared.board.announce(call, reach.words)
        rooms.write_numbers(shared.rank, number, [len(sizes), len(facts), *sizes, *facts])
        own = () if whole is None else torch.split(whole, list(sizes))
        if head.fits:
            place = rooms.small_bytes(shared.rank, number)
            for block, start in zip(own, head.starts, strict=True):
                if len(block):
                    place[start : start + len(block)].copy_(block)
        shared.board.meet(call)
        heads = tuple(_read_head(shared, call, rank) for rank in range(shared.num_ranks))
        return cls(shared, call, own, heads, reach)

    def read(self, targets: Targets) -> None:
        """Copies the blocks that this rank wants; all ranks call it."""
        if all(head.fits for head in self.heads):
            for block, target in targets.items():
                if target.numel():
                    start = self.heads[block.owner].starts[block.number]
                    place = self.shared.rooms.small_bytes(block.owner, self.call.sequence)
                    target.copy_(place[start : start + target.numel()])
            return
        wholes = self._where_they_are()
        if wholes is None:
            self._stream(targets)
            return
        for block, target in targets.items():
            start = sum(self.heads[block.owner].sizes[: block.number])
            target.copy_(wholes[block.owner][start : start + target.numel()])
        part_together(self.shared, self.call)

    def _where_they_are(self) -> list[torch.Tensor] | None:
        """Returns the blocks of every rank in its own memory, if all ranks can read those of all there."""
        shared = self.shared
        if not shared.symmetric.count:
            return None
        announced = [[shared.board.word(rank, index) for index in range(3)] for rank in range(shared.num_ranks)]
        return self.reach.everywhere(announced, [sum(head.sizes) for head in self.heads])

    def _stream(self, targets: Targets) -> None:
        shared = self.shared
        slots = shared.rooms.slots(torch.uint8)
        num_lanes = max(len(head.sizes) for head in self.heads)
        width = shared.rooms.slot_bytes // num_lanes // _ALIGNMENT * _ALIGNMENT
        longest = max(size for head in self.heads for size in head.sizes)

        def write(piece: int, slot: int) -> None:
            for lane, block in enumerate(self.own):
                part = block[piece * width : (piece + 1) * width]
                if len(part):
                    slots[shared.rank][slot][lane * width : lane * width + len(part)].copy_(part)

        def read(piece: int, slot: int) -> None:
            for block, target in targets.items():
                part = target[piece * width : (piece + 1) * width]
                if len(part):
                    start = block.number * width
                    part.copy_(slots[block.owner][slot][start : start + len(part)])

        stream(shared, self.call, -(-longest // width), write if self.own else pass_by, read if targets else pass_by)


@lru_cache(1024)
def _head(sizes: tuple[int, ...], facts: tuple[int, ...]) -> Head:
    """Returns what ranks know of blocks of these sizes; mostly they are those of the operation before."""
    numbers = (2 + len(sizes) + len(facts)) * layout.WORD_BYTES
    *starts, end = accumulate(map(_aligned, sizes), initial=_aligned(numbers))
    return Head(sizes, facts, tuple(starts), end <= layout.SMALL_BYTES)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _read_head(shared: Shared, call: Call, rank: int) -> Head:
    num_sizes, num_facts = shared.rooms.read_numbers(rank, call.sequence, 0, 2)
    numbers = shared.rooms.read_numbers(rank, call.sequence, 2, num_sizes + num_facts)
    return _head(numbers[:num_sizes], numbers[num_sizes:])
