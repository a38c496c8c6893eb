"""Large operations through the slots: programs of one rank, which the native library plays.

Strategy. `slot_order.pipeline` gives the order of stages and pieces, and the waits between them. A program spells out
for one rank what each stage of each piece copies and reduces (`struct program` of the library). It holds offsets and no
addresses, so it is kept for operations of the same sizes. The library stops where it waits for long, and before
reductions that it does not have: those are made here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TypeAlias

import torch

from echelon._native import Code
from echelon.backends.formats import memory_layout
from echelon.backends.formats.slot_order import pipeline
from echelon.backends.operators import Operator, combine_in_order
from echelon.backends.shared.collectives.rank_region import Shared
from echelon.operation_records import OperationRecord

# All that there are with more than 2 ranks (SLOTS_BYTES / 2 MiB). 3 stages with lag 1 need 3.
NUM_SLOTS = 4
_LAG = 1
# In elements: parts begin at multiples of it.
_ALIGNMENT = 64
_WAITS_FOR, _TICKS, _PUTS, _GETS, _COMBINES = range(5)
_WORDS_OF_STEP = 5

Step: TypeAlias = tuple[int, int, int, int, int]
Source: TypeAlias = tuple[int, int]
"""Owner of values, and their offset: in its region, or in this rank's own tensor."""


class Writer:
    """Writer of one rank's program."""

    def __init__(self, rank: int, slot_bytes: int) -> None:
        self._rank = rank
        self._slot_bytes = slot_bytes
        self._steps = array("Q")
        self._sources = array("Q")

    def slot_at(self, slot: int) -> int:
        """Returns the offset of a slot in a rank region."""
        return memory_layout.SLOTS + slot * self._slot_bytes

    def put(self, to: int, start: int, num_bytes: int) -> None:
        """Copies from this rank's tensor into its region."""
        self._steps.extend((_PUTS, to, start, num_bytes, 0))

    def get(self, owner: int, start: int, to: int, num_bytes: int) -> None:
        """Copies from a rank's region into the target."""
        self._steps.extend((_GETS, owner, start, to, num_bytes))

    def combine(self, sources: Sequence[Source], to: int, count: int) -> None:
        """Reduces `count` elements of all ranks, in their order, into the target."""
        self._steps.extend((_COMBINES, len(self._sources) // 2, to, count, 0))
        for source in sources:
            self._sources.extend(source)

    def stages(self, num_pieces: int, *stages: Callable[[int, int], None]) -> bytes:
        """Returns the program that takes every piece through all stages, which write their steps here.

        Args:
            num_pieces: the same on all ranks.
            stages: take the numbers of a piece and of its slot. The first fills the rank's own slot. Each later one
                reads the slots that all ranks filled in the stage before.
        """
        for stage, piece, slot, needs in pipeline(num_pieces, len(stages), _LAG, NUM_SLOTS):
            # Needs 0: the slot is known to be free, since all ranks have left the operation before.
            if needs:
                self._steps.extend((_WAITS_FOR, needs, 0, 0, 0))
            stages[stage](piece, slot)
            # Also on a rank with nothing to do: peers count the ticks of all.
            self._steps.extend((_TICKS, 0, 0, 0, 0))
        return array("Q", [len(self._steps) // _WORDS_OF_STEP, *self._steps, *self._sources]).tobytes()


def play(
    shared: Shared,
    call: OperationRecord,
    program: bytes,
    own: torch.Tensor | None,
    target: torch.Tensor | None,
    operator: Operator | None = None,
) -> None:
    """Plays a program in an operation that all ranks have announced. Blocks until this rank has done its last step.

    Args:
        shared: by the group.
        call: the operation.
        program: made for the sizes of these tensors.
        own: this rank's data, contiguous. None: it has none.
        target: receives the result, contiguous. None: this rank gets none.
        operator: the reduction, if there is one.
    """
    code = shared.board.play(call, program, own, target, operator)
    while code == Code.TO_COMBINE:
        assert own is not None
        assert target is not None
        assert operator is not None
        # No copy: the program of 1 GiB has 2 MB, and stops at each of 8,192 pieces.
        _combine(shared, memoryview(program).cast("Q"), shared.board.step, own.view(-1), target.view(-1), operator)
        code = shared.board.play_on(call)


def _combine(
    shared: Shared, words: memoryview[int], step: int, own: torch.Tensor, target: torch.Tensor, operator: Operator
) -> None:
    """Makes a reduction that the library does not have."""
    at = 1 + step * _WORDS_OF_STEP
    _, first, to, count, _ = words[at : at + _WORDS_OF_STEP]
    at = 1 + words[0] * _WORDS_OF_STEP + 2 * first
    size = target.itemsize
    place = target[to // size : to // size + count]
    parts = []
    for owner, start in zip(words[at::2], words[at + 1 :: 2][: shared.num_ranks], strict=False):
        if owner != shared.rank:
            parts.append(shared.rooms.elements(owner, start, count, target.dtype))
            continue
        mine = own[start // size : start // size + count]
        # The same object, by which the reduction knows that it would overwrite a later part.
        parts.append(place if mine.data_ptr() == place.data_ptr() else mine)
    combine_in_order(place, parts, operator)


@lru_cache(32)
def pieces(
    rank: int, num_ranks: int, slot_bytes: int, num_bytes: int, itemsize: int, readers: tuple[int, ...]
) -> bytes:
    """Returns a program in which each rank writes its pieces, and the `readers` reduce the pieces of all."""
    writer = Writer(rank, slot_bytes)
    sizes = _sizes(num_bytes, slot_bytes)

    def write(piece: int, slot: int) -> None:
        # The only reader's own pieces are read by nobody else, so it does not write them.
        if any(reader != rank for reader in readers):
            writer.put(writer.slot_at(slot), piece * slot_bytes, sizes[piece])

    def read(piece: int, slot: int) -> None:
        if rank in readers:
            begin, place = piece * slot_bytes, writer.slot_at(slot)
            sources = [(peer, begin if peer == rank else place) for peer in range(num_ranks)]
            writer.combine(sources, begin, sizes[piece] // itemsize)

    return writer.stages(len(sizes), write, read)


@lru_cache(32)
def parts(rank: int, num_ranks: int, slot_bytes: int, num_bytes: int, itemsize: int) -> bytes:
    """Returns a program in which each rank reduces its part of each piece, and reads the parts of the others."""
    writer = Writer(rank, slot_bytes)
    sizes = _sizes(num_bytes, slot_bytes)
    peers = [peer for peer in range(num_ranks) if peer != rank]

    def write(piece: int, slot: int) -> None:
        # This rank reduces its own part from its tensor, so no peer reads it from the slot.
        for peer in peers:
            begin, length = _part(sizes[piece], peer, num_ranks, itemsize)
            writer.put(writer.slot_at(slot) + begin, piece * slot_bytes + begin, length)

    def combine(piece: int, slot: int) -> None:
        begin, length = _part(sizes[piece], rank, num_ranks, itemsize)
        home, place = piece * slot_bytes + begin, writer.slot_at(slot) + begin
        sources = [(peer, home if peer == rank else place) for peer in range(num_ranks)]
        writer.combine(sources, home, length // itemsize)
        # For the peers, while it is in the cache.
        writer.put(place, home, length)

    def read(piece: int, slot: int) -> None:
        for peer in peers:
            begin, length = _part(sizes[piece], peer, num_ranks, itemsize)
            writer.get(peer, writer.slot_at(slot) + begin, piece * slot_bytes + begin, length)

    return writer.stages(len(sizes), write, combine, read)


@lru_cache(32)
def shares(rank: int, slot_bytes: int, share_bytes: tuple[int, ...], itemsize: int) -> bytes:
    """Returns a program in which each rank writes the others' shares of its tensor, and reduces its own.

    Args:
        rank: this one.
        slot_bytes: size of a slot.
        share_bytes: size of each rank's share; the first is the longest.
        itemsize: of the dtype.
    """
    writer = Writer(rank, slot_bytes)
    num_ranks = len(share_bytes)
    width = slot_bytes // (num_ranks - 1) // itemsize // _ALIGNMENT * _ALIGNMENT * itemsize
    begins = list(accumulate(share_bytes, initial=0))

    def write(piece: int, slot: int) -> None:
        for peer, size in enumerate(share_bytes):
            if peer != rank and piece * width < size:
                place = writer.slot_at(slot) + _lane(rank, peer) * width
                writer.put(place, begins[peer] + piece * width, min(width, size - piece * width))

    def read(piece: int, slot: int) -> None:
        begin, size = piece * width, share_bytes[rank]
        if begin < size:
            place = writer.slot_at(slot)
            sources = [
                (peer, begins[rank] + begin if peer == rank else place + _lane(peer, rank) * width)
                for peer in range(num_ranks)
            ]
            writer.combine(sources, begin, min(width, size - begin) // itemsize)

    return writer.stages(-(-share_bytes[0] // width), write, read)


@lru_cache(32)
def moves(
    rank: int,
    slot_bytes: int,
    num_lanes: int,
    longest: int,
    shown: tuple[tuple[int, int, int], ...],
    wanted: tuple[tuple[int, int, int, int], ...],
) -> bytes:
    """Returns a program that sends blocks side by side, each in a lane of every slot.

    Args:
        rank: this one.
        slot_bytes: size of a slot.
        num_lanes: of the rank with the most blocks.
        longest: bytes of the longest block of any rank. All run as many pieces: their ticks have to match.
        shown: this rank's blocks: lane, offset in its tensor, bytes.
        wanted: blocks for this rank: owner, lane, offset in the target, bytes.
    """
    writer = Writer(rank, slot_bytes)
    width = slot_bytes // num_lanes // _ALIGNMENT * _ALIGNMENT  # lanes begin at cache lines

    def write(piece: int, slot: int) -> None:
        begin = piece * width
        for lane, block, size in shown:
            if begin < size:
                writer.put(writer.slot_at(slot) + lane * width, block + begin, min(width, size - begin))

    def read(piece: int, slot: int) -> None:
        begin = piece * width
        for owner, lane, target, size in wanted:
            if begin < size:
                writer.get(owner, writer.slot_at(slot) + lane * width, target + begin, min(width, size - begin))

    return writer.stages(-(-longest // width), write, read)


def _sizes(num_bytes: int, slot_bytes: int) -> list[int]:
    """Returns the sizes of the pieces of a tensor."""
    return [min(slot_bytes, num_bytes - begin) for begin in range(0, num_bytes, slot_bytes)]


def _part(num_bytes: int, rank: int, num_ranks: int, itemsize: int) -> tuple[int, int]:
    """Returns offset and size of a rank's part of a piece, split as torch.tensor_split does."""
    count, rest = divmod(num_bytes // itemsize, num_ranks)
    return (rank * count + min(rank, rest)) * itemsize, (count + (rank < rest)) * itemsize


def _lane(owner: int, reader: int) -> int:
    """Returns the index of a reader's share among the shares in a slot of `owner`."""
    return reader - (reader > owner)
