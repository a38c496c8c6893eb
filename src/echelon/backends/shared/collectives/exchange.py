"""How ranks show each other blocks of bytes of which only the owner knows the sizes before they meet.

Every rank writes beside its announcement how large its blocks are, and, if they fit, the blocks themselves. When all
have met, each knows all sizes, so all see alike which way the blocks go:

- those of all ranks stand beside the announcements: they are read there;
- all lie in memory that `group.empty` made, and that every rank still has: they are read where they are, and no rank
  leaves before all have read;
- else all go through the slots, piece by piece, every block in a lane of its own.

Blocks of up to 1 MiB a rank are written beside the announcement wherever they lie: a second copy takes less time than
to wait until all have read.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from echelon.backends.formats import memory_layout
from echelon.backends.memory import as_bytes, copy_contiguous
from echelon.backends.native import Call
from echelon.backends.shared.collectives.rank_region import Shared, SmallBuffers
from echelon.backends.shared.collectives.streaming import pass_by, stream
from echelon.backends.shared.collectives.symmetric import SymmetricView
from echelon.errors import ProtocolError

# How an operation finds out whether it can reach into the tensors of all ranks, and how it ends if it can.


class Meeting(NamedTuple):
    """What a rank knows when all ranks have come."""

    everywhere: list[torch.Tensor] | None
    """The flat tensors of all ranks, if all can be reached; such an operation ends with `exit_barrier`."""
    shown: Sequence[torch.Tensor] | None
    """The same, as all ranks have written them beside their announcements, if all have."""


def meet_with(shared: Shared, call: Call, flat: torch.Tensor, small: SmallBuffers | None = None) -> Meeting:
    """Announces a large operation on a flat tensor, and returns when all ranks have come.

    Args:
        shared: by the group.
        call: the operation.
        flat: as many elements on all ranks.
        small: where ranks show their tensors, those that are not where all can reach them; None: they do not.
    """
    board = shared.board
    reach = shared.symmetric.reach(as_bytes(flat))
    board.announce(call, reach.words)
    if small is not None and not reach.has_tensor:
        small.write(flat)
    board.meet(call)
    if not shared.symmetric.count:
        return Meeting(None, None if small is None else small.places)
    announced = [[board.word(rank, index) for index in range(3)] for rank in range(shared.num_ranks)]
    if small is not None and not any(number for number, *_ in announced):
        return Meeting(None, small.places)
    everywhere = reach.everywhere(announced, [flat.nbytes] * shared.num_ranks)
    return Meeting(None if everywhere is None else [part.view(flat.dtype) for part in everywhere], None)


def exit_barrier(shared: Shared, call: Call) -> None:
    """Returns when all ranks have done what they do with the tensors of others."""
    shared.board.tick()
    shared.board.wait_for_all(1, call)


_ALIGNMENT = 64


class Head(NamedTuple):
    """What a rank says of its blocks."""

    sizes: tuple[int, ...]
    """The bytes of each."""
    facts: tuple[int, ...]
    """Whatever else their readers need to know."""
    unread: int | None
    """The block that no other rank reads, so it is not shown; None: there is none."""
    is_shown: bool
    """Whether the others stand beside the announcement."""
    offsets: tuple[int, ...]
    """Where each begins in the rank's own memory; the last number is where they end."""
    starts: tuple[int, ...]
    """Where each begins beside the announcement, likewise."""
    text: bytes
    """All that, as it stands in memory."""

    @property
    def num_lanes(self) -> int:
        """How many blocks there are to be read."""
        return len(self.sizes) - (self.unread is not None)

    def lane(self, number: int) -> int:
        """Returns the place of a block among those to be read."""
        return number - (self.unread is not None and number > self.unread)

    def read_sizes(self) -> list[int]:
        """Returns the sizes of the blocks to be read."""
        return [size for number, size in enumerate(self.sizes) if number != self.unread]


class Exchange(NamedTuple):
    """Blocks that all ranks have shown; each rank calls `collect` once, if only to read nothing."""

    shared: Shared
    call: Call
    whole: torch.Tensor | None
    heads: Sequence[Head]
    """By rank."""
    reach: SymmetricView
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
            unread: see `Head`.
        """
        rooms, number = shared.rooms, call.sequence
        reach = shared.symmetric.reach(whole)
        head = _head(sizes, facts, unread, memory_layout.SHOWN_BYTES)
        shared.board.announce(call, reach.words)
        rooms.write_text(number, head.text)
        if head.is_shown and whole is not None and sizes:
            _write(rooms.small_at(shared.rank, number), whole.data_ptr(), head)
        shared.board.meet(call)
        heads = [
            head if rank == shared.rank else _read_head(rooms.read_text(rank, number))
            for rank in range(shared.num_ranks)
        ]
        return cls(shared, call, whole, heads, reach)

    def collect(self, result: torch.Tensor | None, owners: Sequence[int], number: int = 0) -> None:
        """Reads one block of each of some ranks; all ranks call it.

        Args:
            result: overwritten with the blocks, one behind the other: a contiguous tensor of as many bytes as they
                have; None: this rank reads nothing.
            owners: the ranks, this one perhaps among them.
            number: of the block among those of each.

        Raises:
            ProtocolError: they do not have as many; a rank said something else before.
        """
        if all(head.is_shown for head in self.heads):
            if result is not None:
                self._read_shown(result, owners, number)
            return
        targets: dict[int, torch.Tensor] = {}
        if result is not None:
            sizes = [self.heads[owner].sizes[number] for owner in owners]
            targets = dict(zip(owners, torch.split(as_bytes(result), sizes), strict=True))
        own = targets.pop(self.shared.rank, None)
        wholes = self._where_they_are()
        if wholes is None:
            self._stream(targets, number)
        else:
            for owner, target in targets.items():
                start = self.heads[owner].offsets[number]
                copy_contiguous(wholes[owner][start : start + target.numel()], target)
            exit_barrier(self.shared, self.call)
        if own is not None:
            copy_contiguous(self._own_blocks()[number], own)

    def _own_blocks(self) -> Sequence[torch.Tensor]:
        """Returns the blocks of this rank as bytes."""
        sizes = self.heads[self.shared.rank].sizes
        return torch.split(as_bytes(self.whole), list(sizes)) if self.whole is not None and sizes else ()

    def _read_shown(self, result: torch.Tensor, owners: Sequence[int], number: int) -> None:
        rooms, heads, sequence = self.shared.rooms, self.heads, self.call.sequence
        target = result.data_ptr()
        end = target + result.nbytes
        for owner in owners:
            head = heads[owner]
            if self.whole is not None and owner == self.shared.rank:
                source = self.whole.data_ptr() + head.offsets[number]
            else:
                source = rooms.small_at(owner, sequence) + head.starts[number]
            size = head.sizes[number]
            if target + size > end:
                raise ProtocolError(f"rank {owner} of the group showed {size} bytes, for which its rows have no room")
            ctypes.memmove(target, source, size)
            target += size

    def _where_they_are(self) -> list[torch.Tensor] | None:
        """Returns the blocks of every rank in its own memory, if all ranks can read those of all there."""
        shared = self.shared
        if not shared.symmetric.count:
            return None
        announced = [[shared.board.word(rank, index) for index in range(3)] for rank in range(shared.num_ranks)]
        return self.reach.everywhere(
            announced, [head.offsets[-1] if any(head.read_sizes()) else 0 for head in self.heads]
        )

    def _stream(self, targets: dict[int, torch.Tensor], number: int) -> None:
        """Has the blocks pass through the slots, side by side."""
        rank, heads, rooms = self.shared.rank, self.heads, self.shared.rooms
        num_lanes = max(1, max(head.num_lanes for head in heads))
        width = rooms.slot_bytes // num_lanes // _ALIGNMENT * _ALIGNMENT
        shown = [
            (heads[rank].lane(n) * width, block.data_ptr(), block.nbytes)
            for n, block in enumerate(self._own_blocks())
            if n != heads[rank].unread
        ]
        wanted = [
            (owner, heads[owner].lane(number) * width, target.data_ptr(), target.nbytes)
            for owner, target in targets.items()
        ]

        def write(piece: int, slot: int) -> None:
            place, begin = rooms.slot_at(rank, slot), piece * width
            for lane, block, size in shown:
                if begin < size:
                    ctypes.memmove(place + lane, block + begin, min(width, size - begin))

        def read(piece: int, slot: int) -> None:
            begin = piece * width
            for owner, lane, target, size in wanted:
                if begin < size:
                    ctypes.memmove(target + begin, rooms.slot_at(owner, slot) + lane, min(width, size - begin))

        longest = max((size for head in heads for size in head.read_sizes()), default=0)
        stream(self.shared, self.call, -(-longest // width), write if shown else pass_by, read if wanted else pass_by)


def _write(place: int, blocks: int, head: Head) -> None:
    """Writes the blocks that stand at one address to where they are shown, in the place at another."""
    offsets, starts = head.offsets, head.starts
    before = len(head.sizes) if head.unread is None else head.unread
    ctypes.memmove(place + starts[0], blocks, offsets[before])
    if head.unread is not None:
        after = offsets[before + 1]
        ctypes.memmove(place + starts[before], blocks + after, offsets[-1] - after)


@lru_cache(1024)
def _head(sizes: tuple[int, ...], facts: tuple[int, ...], unread: int | None, limit: int) -> Head:
    """Returns what a rank says of blocks of these sizes, which it shows if they have no more than `limit` bytes."""
    num_words = 4 + len(sizes) + len(facts)
    begin = -(-num_words * memory_layout.WORD_BYTES // _ALIGNMENT) * _ALIGNMENT
    shown = [0 if number == unread else size for number, size in enumerate(sizes)]
    starts = tuple(accumulate(shown, initial=begin))
    is_shown = sum(shown) <= limit and starts[-1] <= memory_layout.PLACE_BYTES
    text = array("Q", [num_words, len(sizes), is_shown, 0 if unread is None else unread + 1, *sizes, *facts])
    return Head(sizes, facts, unread, is_shown, tuple(accumulate(sizes, initial=0)), starts, text.tobytes())


@lru_cache(1024)
def _read_head(text: bytes) -> Head:
    """Returns what a peer has said; mostly it is the same as in the operation before."""
    _, num_sizes, is_shown, after_unread, *numbers = array("Q", text)
    sizes, facts = tuple(numbers[:num_sizes]), tuple(numbers[num_sizes:])
    return _head(
        sizes, facts, after_unread - 1 if after_unread else None, memory_layout.SHOWN_BYTES if is_shown else -1
    )
