"""How ranks show each other blocks of bytes of which only the owner knows the sizes before they meet.

Every rank writes beside its announcement how large its blocks are, and, if they fit, the blocks themselves. When all
have met, each knows all sizes. Only if one rank's blocks did not fit, those of all go through the slots, piece by
piece, every block in a lane of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from echelon.backends.native import Call
from echelon.backends.shared import layout
from echelon.backends.shared.room import Shared
from echelon.backends.shared.streaming import pass_by, stream

_SLOT_BYTES = 512 << 10
_ALIGNMENT = 64


class Head(NamedTuple):
    """What a rank says of its blocks: the bytes of each, and whatever else their readers need to know."""

    sizes: tuple[int, ...]
    facts: tuple[int, ...]


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

    @classmethod
    def meet(cls, shared: Shared, call: Call, blocks: Sequence[torch.Tensor], facts: Sequence[int] = ()) -> Exchange:
        """Shows this rank's blocks, each a flat tensor of bytes, and returns when all have shown theirs."""
        rooms, number = shared.rooms, call.sequence
        head = Head(tuple(block.numel() for block in blocks), tuple(facts))
        shared.board.announce(call)
        rooms.write_numbers(shared.rank, number, [len(head.sizes), len(head.facts), *head.sizes, *head.facts])
        if _fits(head):
            place = rooms.small_bytes(shared.rank, number)
            for block, start in zip(blocks, _starts(head), strict=True):
                if block.numel():
                    place[start : start + block.numel()].copy_(block)
        shared.board.meet(call)
        heads = tuple(_read_head(shared, call, rank) for rank in range(shared.num_ranks))
        return cls(shared, call, blocks, heads)

    def read(self, targets: Targets) -> None:
        """Copies the blocks that this rank wants; all ranks call it."""
        if all(_fits(head) for head in self.heads):
            for block, target in targets.items():
                if target.numel():
                    start = _starts(self.heads[block.owner])[block.number]
                    place = self.shared.rooms.small_bytes(block.owner, self.call.sequence)
                    target.copy_(place[start : start + target.numel()])
            return
        self._stream(targets)

    def _stream(self, targets: Targets) -> None:
        shared = self.shared
        slots = shared.rooms.slots(_SLOT_BYTES, torch.uint8)
        num_lanes = max(len(head.sizes) for head in self.heads)
        width = _SLOT_BYTES // num_lanes // _ALIGNMENT * _ALIGNMENT
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


def _fits(head: Head) -> bool:
    """Says whether blocks stand beside their announcement."""
    return _data_start(head) + sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in head.sizes) <= layout.SMALL_BYTES


def _data_start(head: Head) -> int:
    numbers = 2 + len(head.sizes) + len(head.facts)
    return -(-numbers * layout.WORD_BYTES // _ALIGNMENT) * _ALIGNMENT


def _starts(head: Head) -> list[int]:
    """Returns where each block begins in the place for small data."""
    starts = []
    start = _data_start(head)
    for size in head.sizes:
        starts.append(start)
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return starts


def _read_head(shared: Shared, call: Call, rank: int) -> Head:
    num_sizes, num_facts = shared.rooms.read_numbers(rank, call.sequence, 0, 2)
    sizes = shared.rooms.read_numbers(rank, call.sequence, 2, num_sizes)
    return Head(sizes, shared.rooms.read_numbers(rank, call.sequence, 2 + num_sizes, num_facts))
