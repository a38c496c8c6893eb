"""Exchange of byte blocks whose sizes only their owner knows beforehand.

Every rank writes a header with the sizes of its blocks beside its announcement and, if they fit, the blocks themselves.
After the meeting each rank knows all sizes, so all choose the same path:

- Blocks of all ranks lie beside the announcements: they are read there.
- All blocks lie in symmetric memory (`group.empty`) that every rank still maps: they are read in place, and an exit
  barrier keeps their owners until all have read.
- Otherwise all pass through the slots, piece by piece, each block in a column (lane) of its own.

Blocks of up to 1 MiB a rank are written beside the announcement even if they lie in symmetric memory: a second copy
takes less time than waiting until all have read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from echelon._native import Act, copy
from echelon.backends.formats import memory_layout
from echelon.backends.memory import as_bytes, copy_contiguous
from echelon.backends.shared.collectives import streaming
from echelon.backends.shared.collectives.native_calls import Way
from echelon.backends.shared.collectives.rank_region import Shared, SmallBuffers
from echelon.backends.shared.collectives.symmetric import SymmetricView
from echelon.errors import ProtocolError
from echelon.operation_records import OperationRecord


class Meeting(NamedTuple):
    """Outcome of a meeting: the tensors of all ranks, if they can be reached."""

    everywhere: list[torch.Tensor] | None
    """Flat symmetric tensors of all ranks, if all can be reached. Such an operation ends with `exit_barrier`."""
    shown: Sequence[torch.Tensor] | None
    """Copies of the tensors of all ranks, if all were written beside the announcements."""


def meet_with(shared: Shared, call: OperationRecord, flat: torch.Tensor, small: SmallBuffers | None = None) -> Meeting:
    """Announces a large operation on a flat tensor. Blocks until all ranks have announced it.

    Args:
        shared: by the group.
        call: the operation.
        flat: as many elements on all ranks.
        small: buffers for tensors outside symmetric memory; None: such tensors are not written here.

    Raises:
        CollectiveMismatch: a rank has announced another operation.
    """
    board = shared.board
    reach = shared.symmetric.reach(as_bytes(flat))
    # Written before `meet`, so one meeting both synchronises and transfers.
    if small is not None and not reach.has_tensor:
        small.write(flat)
    board.meet(call, reach.words)
    # Fast path: the group has never allocated symmetric memory.
    if not shared.symmetric.count:
        return Meeting(None, None if small is None else small.places)
    announced = [[board.word(rank, index) for index in range(3)] for rank in range(shared.num_ranks)]
    if small is not None and not any(number for number, *_ in announced):
        return Meeting(None, small.places)
    # None if one rank passed an ordinary tensor: all ranks see this alike, and all take the slots.
    everywhere = reach.everywhere(announced, [flat.nbytes] * shared.num_ranks)
    return Meeting(None if everywhere is None else [part.view(flat.dtype) for part in everywhere], None)


def exit_barrier(shared: Shared, call: OperationRecord) -> None:
    """Blocks until all ranks are done. No rank reads or writes another's tensor after it."""
    shared.board.tick()
    shared.board.wait_for_all(1, call)


_ALIGNMENT = 64  # bytes of a cache line


class Head(NamedTuple):
    """Header of a rank's blocks."""

    sizes: tuple[int, ...]
    """Bytes of each block."""
    facts: tuple[int, ...]
    """Further numbers for the readers, such as a dtype or numbers of rows."""
    unread: int | None
    """Index of the block that no other rank reads, so it is not written. None if there is none."""
    is_shown: bool
    """Whether the other blocks lie beside the announcement."""
    offsets: tuple[int, ...]
    """Offset of each block in the rank's own memory, and the end of the last."""
    starts: tuple[int, ...]
    """Offset of each block beside the announcement, and the end of the last."""
    text: bytes
    """The header as bytes in shared memory."""

    @property
    def num_lanes(self) -> int:
        """Number of blocks that other ranks read."""
        return len(self.sizes) - (self.unread is not None)

    def lane(self, number: int) -> int:
        """Returns the index of block `number` among the blocks that other ranks read."""
        return number - (self.unread is not None and number > self.unread)

    def read_sizes(self) -> list[int]:
        """Returns the sizes of the blocks that other ranks read."""
        return [size for number, size in enumerate(self.sizes) if number != self.unread]


class Exchange(NamedTuple):
    """Blocks that all ranks have announced. Each rank calls `collect` once, even if it reads nothing."""

    shared: Shared
    call: OperationRecord
    whole: torch.Tensor | None
    heads: Sequence[Head]
    """Headers, by rank."""
    reach: SymmetricView
    """Symmetric blocks that this rank mapped when it announced."""

    @classmethod
    def meet(
        cls,
        shared: Shared,
        call: OperationRecord,
        whole: torch.Tensor | None,
        sizes: tuple[int, ...],
        facts: tuple[int, ...] = (),
        unread: int | None = None,
    ) -> Exchange:
        """Announces this rank's blocks. Blocks until all ranks have announced theirs.

        Args:
            shared: by the group.
            call: the operation.
            whole: all blocks, one behind the other, as a contiguous tensor; None: this rank has none.
            sizes: of the blocks, in bytes.
            facts: see `Head`.
            unread: see `Head`.

        Raises:
            CollectiveMismatch: a rank has announced another operation.
        """
        rooms, number = shared.rooms, call.sequence
        reach = shared.symmetric.reach(whole)
        head = _head(sizes, facts, unread, memory_layout.SHOWN_BYTES)
        rooms.write_text(number, head.text)
        if head.is_shown and whole is not None and sizes:
            _write(rooms.small_at(shared.rank, number), whole.data_ptr(), head)
        shared.board.meet(call, reach.words)
        return cls.after_meeting(shared, call, whole, head, reach)

    @classmethod
    def after_meeting(
        cls, shared: Shared, call: OperationRecord, whole: torch.Tensor | None, head: Head, reach: SymmetricView
    ) -> Exchange:
        """Reads the headers of the other ranks. All have announced their blocks; `head` is of this rank's."""
        heads = [
            head if rank == shared.rank else _read_head(shared.rooms.read_text(rank, call.sequence))
            for rank in range(shared.num_ranks)
        ]
        return cls(shared, call, whole, heads, reach)

    def collect(self, result: torch.Tensor | None, owners: Sequence[int], number: int = 0) -> None:
        """Reads one block of each of the `owners`. All ranks call it; it may block until all have read.

        Args:
            result: overwritten with the blocks, one behind the other: a contiguous tensor of their total size;
                None: this rank reads nothing.
            owners: ranks to read from, perhaps this one too.
            number: index of the block among the blocks of each owner.

        Raises:
            ProtocolError: the blocks do not fit `result`, as a rank's sizes contradict its facts.
        """
        # Fast path: no second meeting. The data stands until the operation after the next.
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
        # Last, so that the peers need not wait for a copy that concerns nobody else.
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
            # A rank's own block is copied straight from its tensor, as it may not be written beside the announcement.
            if self.whole is not None and owner == self.shared.rank:
                source = self.whole.data_ptr() + head.offsets[number]
            else:
                source = rooms.small_at(owner, sequence) + head.starts[number]
            size = head.sizes[number]
            # An error, no assert: under `python -O` a peer's wrong sizes would overwrite memory behind the result.
            if target + size > end:
                raise ProtocolError(f"rank {owner} of the group published {size} bytes, more than its rows take")
            copy(target, source, size)
            target += size

    def _where_they_are(self) -> list[torch.Tensor] | None:
        """Returns the blocks of every rank in symmetric memory. None unless all ranks can reach all of them."""
        shared = self.shared
        if not shared.symmetric.count:
            return None
        announced = [[shared.board.word(rank, index) for index in range(3)] for rank in range(shared.num_ranks)]
        # A rank whose blocks nobody reads need not be reached, so its size is 0.
        return self.reach.everywhere(
            announced, [head.offsets[-1] if any(head.read_sizes()) else 0 for head in self.heads]
        )

    def _stream(self, targets: dict[int, torch.Tensor], number: int) -> None:
        """Sends the blocks through the slots, side by side, each in a lane of every slot."""
        shared, heads, whole = self.shared, self.heads, self.whole
        head = heads[shared.rank]
        shown = tuple(
            (head.lane(n), head.offsets[n], size)
            for n, size in enumerate(head.sizes if whole is not None else ())
            if n != head.unread
        )
        base = min((target.data_ptr() for target in targets.values()), default=0)
        wanted = tuple(
            (owner, heads[owner].lane(number), target.data_ptr() - base, target.nbytes)
            for owner, target in targets.items()
        )
        num_lanes = max(1, max(head.num_lanes for head in heads))
        longest = max((size for head in heads for size in head.read_sizes()), default=0)
        program = streaming.moves(shared.rank, shared.rooms.slot_bytes, num_lanes, longest, shown, wanted)
        first = min(targets.values(), key=torch.Tensor.data_ptr, default=None)
        streaming.play(shared, self.call, program, whole, first)


class _Known(NamedTuple):
    """Exchange that was made, for the next one like it."""

    head: Head
    """Of this rank."""
    heads: Sequence[Head]
    plan: bytes


class Repeated:
    """Exchange of a prepared collective: mostly the blocks of all ranks are as long as the last time.

    Then one call of the native library writes this rank's blocks, meets, compares the headers of all ranks with those
    of the last time, and reads.
    """

    def __init__(self) -> None:
        self._known: _Known | None = None
        self.way: Way | None = None
        """Way in which the library runs it without Python. None if there is none."""

    def run(
        self,
        shared: Shared,
        call: OperationRecord,
        shown: Shown,
        owners: Sequence[int],
        number: int,
        make_result: Callable[[Sequence[Head]], torch.Tensor | None],
    ) -> torch.Tensor | None:
        """Exchanges blocks and returns the result. Blocks until all ranks have announced theirs.

        Args:
            shared: by the group.
            call: the operation.
            shown: this rank's blocks.
            owners, number: see `Exchange.collect`.
            make_result: returns the tensor to overwrite, contiguous, from the headers of all ranks; None: this rank
                reads nothing.

        Raises:
            CollectiveMismatch: a rank has announced another operation.
        """
        whole, sizes, facts, unread = shown
        known = self._known
        head = _head(sizes, facts, unread, memory_layout.SHOWN_BYTES)
        # Mostly the same object, as it is cached.
        if known is not None and (known.head is head or known.head == head):
            result = make_result(known.heads)
            reach = shared.symmetric.reach(whole)
            own = whole.data_ptr() if whole is not None else 0
            target = result.data_ptr() if result is not None else 0
            if shared.board.exchange(call, known.plan, own, target, reach.words):
                return result
            exchange = Exchange.after_meeting(shared, call, whole, known.head, reach)
        else:
            exchange = Exchange.meet(shared, call, whole, sizes, facts, unread)
        result = make_result(exchange.heads)
        exchange.collect(result, owners, number)
        is_read = result is not None
        now = _known(shared.rank, exchange.heads, owners if is_read else (), number, whole is not None)
        if known is not None and (now is None or now.plan != known.plan):
            shared.known.forget()
        self._known = now
        self.way = None if now is None else Way(Act.EXCHANGES, plan=now.plan, makes_result=is_read)
        return result


class Shown(NamedTuple):
    """Blocks that a rank shows, see `Exchange.meet`."""

    whole: torch.Tensor | None
    sizes: tuple[int, ...] = ()
    facts: tuple[int, ...] = ()
    unread: int | None = None


def _known(rank: int, heads: Sequence[Head], owners: Sequence[int], number: int, has_blocks: bool) -> _Known | None:
    """Returns an exchange with its plan, `struct plan` of the library. None if blocks do not lie beside the notes."""
    if not all(head.is_shown for head in heads):
        return None
    head = heads[rank]
    reads: list[int] = []
    to = 0
    for owner in owners:
        own = has_blocks and owner == rank
        begins = heads[owner].offsets if own else heads[owner].starts
        reads += (owner, begins[number], to, heads[owner].sizes[number])
        to += heads[owner].sizes[number]
    writes = _writes(head) if has_blocks and head.sizes else []
    columns = zip(*(writes + [(0, 0, 0)] * (2 - len(writes))), strict=True)
    # Ten words, the reads, the headers' positions, the headers.
    reads_at = 10 * memory_layout.WORD_BYTES
    heads_at = reads_at + len(reads) * memory_layout.WORD_BYTES
    texts_at = heads_at + 2 * len(heads) * memory_layout.WORD_BYTES
    starts = accumulate((len(head.text) for head in heads), initial=texts_at)
    places = [word for head, start in zip(heads, starts, strict=False) for word in (start, len(head.text))]
    words = [len(owners), reads_at, len(writes), *(word for column in columns for word in column), heads_at]
    return _Known(head, heads, array("Q", [*words, *reads, *places]).tobytes() + b"".join(h.text for h in heads))


def _writes(head: Head) -> list[tuple[int, int, int]]:
    """Returns the copies of a rank's blocks to its buffer: offsets from and to, and bytes."""
    before = len(head.sizes) if head.unread is None else head.unread
    # Two copies at most: the blocks before the unread one, and the blocks after it.
    copies = [(0, head.starts[0], head.offsets[before])]
    if head.unread is not None:
        after = head.offsets[before + 1]
        copies.append((after, head.starts[before], head.offsets[-1] - after))
    return copies


def _write(place: int, blocks: int, head: Head) -> None:
    """Copies a rank's blocks from one address to its buffer at another."""
    for source, target, num_bytes in _writes(head):
        copy(place + target, blocks + source, num_bytes)


# Cached: programs repeat the same sizes, and a header costs several tuples.
@lru_cache(1024)
def _head(sizes: tuple[int, ...], facts: tuple[int, ...], unread: int | None, limit: int) -> Head:
    """Returns the header of blocks with these sizes. They are shown if their total is at most `limit` bytes."""
    num_words = 4 + len(sizes) + len(facts)
    begin = -(-num_words * memory_layout.WORD_BYTES // _ALIGNMENT) * _ALIGNMENT
    shown = [0 if number == unread else size for number, size in enumerate(sizes)]
    starts = tuple(accumulate(shown, initial=begin))
    is_shown = sum(shown) <= limit and starts[-1] <= memory_layout.PLACE_BYTES
    text = array("Q", [num_words, len(sizes), is_shown, 0 if unread is None else unread + 1, *sizes, *facts])
    return Head(sizes, facts, unread, is_shown, tuple(accumulate(sizes, initial=0)), starts, text.tobytes())


@lru_cache(1024)
def _read_head(text: bytes) -> Head:
    """Decodes a peer's header. Cached, as it is mostly that of an earlier operation."""
    _, num_sizes, is_shown, after_unread, *numbers = array("Q", text)
    sizes, facts = tuple(numbers[:num_sizes]), tuple(numbers[num_sizes:])
    return _head(
        sizes, facts, after_unread - 1 if after_unread else None, memory_layout.SHOWN_BYTES if is_shown else -1
    )
