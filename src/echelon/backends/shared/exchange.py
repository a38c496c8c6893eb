"""How ranks show each other blocks of bytes of which only the owner knows the sizes before they meet.

Every rank writes beside its announcement how large its blocks are, and, if they fit, the blocks themselves. When all
have met, each knows all sizes, so all see alike which way the blocks go:

- those of all ranks stand beside the announcements: they are read there;
- all lie in memory that `group.empty` made, and that every rank still has: they are read where they are, and no rank
  leaves before all have read;
- else all go through the slots, piece by piece, every block in a lane of its own.

Blocks of up to 256 KiB a rank are written beside the announcement wherever they lie, larger ones only if that saves
nothing: if they do not lie in such memory.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from echelon.backends.memory import as_bytes
from echelon.backends.native import Call
from echelon.backends.shared import layout
from echelon.backends.shared.room import Shared
from echelon.backends.shared.short_way import part_together
from echelon.backends.shared.streaming import pass_by, stream
from echelon.backends.shared.symmetric import Reach

_ALIGNMENT = 64
_ONE_COPY_BYTES = 4096
"""To copy so many at once is faster than to leave out what nobody reads."""


class Head(NamedTuple):
    """What a rank says of its blocks."""

    sizes: tuple[int, ...]
    """The bytes of each."""
    facts: tuple[int, ...]
    """Whatever else their readers need to know."""
    is_shown: bool
    """Whether they stand beside the announcement."""
    starts: tuple[int, ...]
    """Where each begins there, one behind the other; the last number is where they end."""
    text: bytes
    """All that, as it stands in memory."""


class Exchange(NamedTuple):
    """Blocks that all ranks have shown; each rank calls `collect` once, if only to read nothing."""

    shared: Shared
    call: Call
    whole: torch.Tensor | None
    unread: int | None
    heads: Sequence[Head]
    """By rank."""
    reach: Reach
    """What this rank could reach when it announced its blocks."""

    @classmethod
    def meet(
        cls,
        shared: Shared,
        call: Call,
        whole: torch.Tensor | None,
        sizes: tuple[int, ...],
        facts: tuple[int, ...] = (),
        unread: int | None = None,
    ) -> Exchange:
        """Shows this rank's blocks, and returns when all have shown theirs.

        Args:
            shared: by the group.
            call: the operation.
            whole: all blocks, one behind the other: a contiguous tensor; None: this rank has none.
            sizes: of the blocks, in bytes.
            facts: see `Head`.
            unread: the block that no other rank reads; None: there is none.
        """
        rooms, number = shared.rooms, call.sequence
        reach = shared.symmetric.reach(whole)
        limit = layout.SMALL_BYTES if reach.has_tensor else layout.SHOWN_BYTES
        head = _head(sizes, facts, limit)
        shared.board.announce(call, reach.words)
        rooms.write_text(number, head.text)
        if head.is_shown and whole is not None and sizes:
            _write(rooms.small_at(shared.rank, number), whole, head, unread)
        shared.board.meet(call)
        heads = [
            head if rank == shared.rank else _read_head(rooms.read_text(rank, number))
            for rank in range(shared.num_ranks)
        ]
        return cls(shared, call, whole, unread, heads, reach)

    def collect(self, result: torch.Tensor | None, owners: Sequence[int], number: int = 0) -> None:
        """Reads one block of each of some ranks; all ranks call it.

        Args:
            result: overwritten with the blocks, one behind the other: a contiguous tensor of as many bytes as they
                have; None: this rank reads nothing.
            owners: the ranks, this one perhaps among them.
            number: of the block among those of each.
        """
        if all(head.is_shown for head in self.heads):
            if result is not None:
                self._read_shown(result, owners, number)
            return
        targets: dict[int, torch.Tensor] = {}
        if result is not None:
            sizes = [self.heads[owner].sizes[number] for owner in owners]
            targets = dict(zip(owners, torch.split(as_bytes(result), sizes), strict=True))
        wholes = self._where_they_are()
        if wholes is None:
            self._stream(targets, number)
            return
        for owner, target in targets.items():
            start = sum(self.heads[owner].sizes[:number])
            target.copy_(wholes[owner][start : start + target.numel()])
        part_together(self.shared, self.call)

    def _read_shown(self, result: torch.Tensor, owners: Sequence[int], number: int) -> None:
        rooms, heads, sequence = self.shared.rooms, self.heads, self.call.sequence
        target = result.data_ptr()
        end = target + result.nbytes
        for owner in owners:
            head = heads[owner]
            start = head.starts[number]
            if self.whole is not None and owner == self.shared.rank:
                source = self.whole.data_ptr() + start - head.starts[0]
            else:
                source = rooms.small_at(owner, sequence) + start
            size = head.sizes[number]
            assert target + size <= end
            ctypes.memmove(target, source, size)
            target += size

    def _where_they_are(self) -> list[torch.Tensor] | None:
        """Returns the blocks of every rank in its own memory, if all ranks can read those of all there."""
        shared = self.shared
        if not shared.symmetric.count:
            return None
        announced = [[shared.board.word(rank, index) for index in range(3)] for rank in range(shared.num_ranks)]
        return self.reach.everywhere(announced, [sum(head.sizes) for head in self.heads])

    def _stream(self, targets: dict[int, torch.Tensor], number: int) -> None:
        shared, own_head = self.shared, self.heads[self.shared.rank]
        own: Sequence[torch.Tensor] = ()
        if self.whole is not None and own_head.sizes:
            own = torch.split(as_bytes(self.whole), list(own_head.sizes))
        slots = shared.rooms.slots(torch.uint8)
        width = shared.rooms.slot_bytes // max(len(head.sizes) for head in self.heads) // _ALIGNMENT * _ALIGNMENT
        longest = max(size for head in self.heads for size in head.sizes)
        if shared.rank in targets:
            targets.pop(shared.rank).copy_(own[number])
        lanes = [(lane, block) for lane, block in enumerate(own) if lane != self.unread]

        def write(piece: int, slot: int) -> None:
            for lane, block in lanes:
                part = block[piece * width : (piece + 1) * width]
                if len(part):
                    slots[shared.rank][slot][lane * width : lane * width + len(part)].copy_(part)

        def read(piece: int, slot: int) -> None:
            for owner, target in targets.items():
                part = target[piece * width : (piece + 1) * width]
                if len(part):
                    part.copy_(slots[owner][slot][number * width : number * width + len(part)])

        stream(shared, self.call, -(-longest // width), write if lanes else pass_by, read if targets else pass_by)


def _write(place: int, whole: torch.Tensor, head: Head, unread: int | None) -> None:
    """Writes the blocks to where they are shown, in the place at that address."""
    begin, end = head.starts[0], head.starts[-1]
    source = whole.data_ptr() - begin
    if unread is None or end - begin <= _ONE_COPY_BYTES:
        ctypes.memmove(place + begin, source + begin, end - begin)
        return
    before, after = head.starts[unread], head.starts[unread + 1]
    ctypes.memmove(place + begin, source + begin, before - begin)
    ctypes.memmove(place + after, source + after, end - after)


@lru_cache(1024)
def _head(sizes: tuple[int, ...], facts: tuple[int, ...], limit: int) -> Head:
    """Returns what a rank says of blocks of these sizes, which it shows if they have no more than `limit` bytes."""
    num_words = 3 + len(sizes) + len(facts)
    begin = -(-num_words * layout.WORD_BYTES // _ALIGNMENT) * _ALIGNMENT
    starts = tuple(accumulate(sizes, initial=begin))
    is_shown = sum(sizes) <= limit and starts[-1] <= layout.PLACE_BYTES
    text = array("Q", [num_words, len(sizes), is_shown, *sizes, *facts]).tobytes()
    return Head(sizes, facts, is_shown, starts, text)


@lru_cache(1024)
def _read_head(text: bytes) -> Head:
    """Returns what a peer has said; mostly it is the same as in the operation before."""
    _, num_sizes, is_shown, *numbers = array("Q", text)
    return _head(tuple(numbers[:num_sizes]), tuple(numbers[num_sizes:]), layout.SHOWN_BYTES if is_shown else -1)
