"""Sending end of a link: the queue of messages for one rank, written straight into that rank's ring and arena.

Not locked: the backend calls it under its own lock. No call waits. A payload is written as soon as it is sent, so the
send is complete at once. It stays queued only if ring or arena are full, or if the message is longer than its part.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from functools import partial

import torch

from echelon._native import Code, Words, copy, core, message
from echelon.backends.formats import message_layout
from echelon.backends.formats.arena import MAX_PART_BYTES, MIN_PART_BYTES, Arena
from echelon.backends.formats.wire import Tag
from echelon.backends.memory import type_of
from echelon.backends.shared.memory.segment import Window
from echelon.backends.shared.messages import message_region
from echelon.backends.shared.messages.message_region import MessageRegion
from echelon.backends.tcp.link import Outgoing, Sender, SendQueue
from echelon.backends.work import Work
from echelon.errors import EchelonError, ProtocolError

# The first 64 MiB of an arena keep their pages while free, for the next message. The rest is returned to the system.
_KEPT_BYTES = 64 << 20


class _Message(Outgoing):
    """Queued message."""

    __slots__ = ("first", "head", "num_pieces", "num_written", "part", "slots", "tensor")

    def __init__(self, head: bytes, tensor: torch.Tensor, tag: Tag, work: Work[None], num_pieces: int) -> None:
        super().__init__(tag, work)
        self.head = head
        self.tensor = tensor
        self.part = -1
        self.num_pieces = num_pieces
        self.num_written = 0
        self.first = 0
        """Number of pieces that were written before its own."""
        self.slots = message_layout.Slots(0)


class _Parts:
    """Arena that this rank writes for one peer."""

    def __init__(self, at: MessageRegion, reader: int) -> None:
        self._region = at
        self._reader = reader
        self._arena = Arena()
        self._window: Window | None = None
        self._words: Words = []
        self._lent: dict[int, int] = {}
        """Size of each part that the reader has not freed yet, by its offset."""
        self._num_freed = 0

    def take(self, part_bytes: int) -> int | None:
        """Allocates a part and returns its offset. None if there is no room."""
        self._collect()
        part = self._arena.take(part_bytes)
        if part is None:
            return None
        self._lent[part[0]] = part[1]
        return part[0]

    def give_back(self, start: int) -> None:
        """Takes back a part that the reader never saw."""
        self._free(start, self._lent.pop(start))

    def write(self, source: int, num_bytes: int, piece: int, start: int, slot: int) -> None:
        """Copies a piece of a message.

        Args:
            source: address of the piece in this process.
            num_bytes: its size.
            piece: its number among all pieces.
            start: offset of the part.
            slot: the piece's place in the part, in pieces.
        """
        at = self._mapped().address + message_region.PARTS + start + slot * self._region.sizes.piece_bytes
        # The slot is stored before the piece is counted, so the reader finds it with the counter.
        self._words[message_region.SLOT_WORDS + piece % message_region.NUM_SLOT_WORDS] = slot
        copy(at, source, num_bytes)

    def _collect(self) -> None:
        """Takes back the parts that the reader has freed."""
        while self._lent:
            # In the order of their numbers: a part whose word is late keeps later ones waiting, and none is missed.
            number = self._num_freed
            part = message_layout.freed_part(self._words[number % message_region.NUM_FREED_WORDS], number)
            if part is None:
                return
            size = self._lent.pop(part * MIN_PART_BYTES, None)
            if size is None:
                raise ProtocolError(f"part {part} freed, which was not in use: the peer does not speak this protocol")
            self._num_freed = number + 1
            self._free(part * MIN_PART_BYTES, size)

    def _free(self, start: int, size: int) -> None:
        whole = self._arena.give_back(start, size)
        # MADV_REMOVE frees the pages of the file for all processes; the range is wholly free, so no tensor lies in it.
        if whole is not None and whole >= _KEPT_BYTES:
            self._mapped().memory.madvise(mmap.MADV_REMOVE, message_region.PARTS + whole, MAX_PART_BYTES)

    def _mapped(self) -> Window:
        if self._window is None:
            self._window, self._words = self._region.map_arena(self._region.number, self._reader)
        return self._window


class RingSender(Sender):
    """Writer of this rank's messages to one peer."""

    def __init__(self, at: MessageRegion, reader: int) -> None:
        """Starts without an arena, which is mapped at the first large message.

        Args:
            at: the region with ring and counters.
            reader: the other rank's number on this host.
        """
        self._post = at
        self._reader = reader
        self._words = at.words
        self._sizes = at.sizes
        self._inline_bytes = at.sizes.inline_bytes
        self._news = at.news(at.number, reader)
        self._answers = at.answers(at.number, reader)
        self._outlet = at.outlet(reader)
        self._address = ctypes.addressof(self._outlet)
        self.queue: SendQueue[_Message] = SendQueue()
        self._waits = False
        self._pieces = 0
        self._parts = _Parts(at, reader)

    def send(self, head: bytes, tensor: torch.Tensor, tag: Tag, work: Work[None]) -> None:  # noqa: D102
        if self.put(head, tensor, tag):
            work.complete()
            return
        self.queue.append(_Message(head, tensor, tag, work, self._sizes.num_pieces(tensor.nbytes)))
        self.flush()

    def put(self, head: bytes, tensor: torch.Tensor, tag: Tag) -> bool:  # noqa: ARG002, D102
        return not self.queue and tensor.nbytes <= self._inline_bytes and self._put(head, tensor)

    def prepare(  # noqa: D102
        self, head: bytes, tag: Tag, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Callable[[torch.Tensor], int]:
        like = self.message(head, shape, dtype)
        return super().prepare(head, tag, shape, dtype) if like is None else partial(core.send, like)

    def message(self, head: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> bytes | None:  # noqa: D102
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self._inline_bytes:
            return None
        return message(self._address, head, num_bytes, type_of(dtype), shape)

    def flush(self) -> None:  # noqa: D102
        self._write_all()
        if self.queue and not self._waits:
            # Then tries again: room made before `waiting` was stored rang for nobody, and another thread of this rank
            # may sleep.
            self._say_whether_it_waits()
            message_region.fence()
            self._write_all()
        if self._waits and not self.queue:
            self._say_whether_it_waits()

    def _say_whether_it_waits(self) -> None:
        self._waits = bool(self.queue)
        self._post.num_waiting += 1 if self._waits else -1
        self._words[self._news + message_layout.WAITING] = self._waits

    def _write_all(self) -> None:
        while self.queue and self._write(self.queue[0]):
            outgoing = self.queue.popleft()
            if outgoing.work is not None:
                outgoing.work.complete()

    def fail(self, error: EchelonError) -> None:  # noqa: D102
        super().fail(error)
        self._post.num_waiting -= self._waits
        self._waits = False

    def _write(self, outgoing: _Message) -> bool:
        """Writes as much of a message as there is room for. True if all of it is written."""
        tensor = outgoing.tensor
        if outgoing.part < 0:
            if tensor.nbytes <= self._inline_bytes and self._put(outgoing.head, tensor):
                return True
            # Without room in the ring a large message gets a part: only small ones wait for their reader.
            if tensor.nbytes <= self._sizes.small_bytes or not self._begin(outgoing):
                return False
        words = self._words
        while outgoing.num_written < outgoing.num_pieces:
            # The counter is read anew for each piece: the reader drains while this rank writes.
            slot = outgoing.slots.next(words[self._answers + message_layout.DRAINED] - outgoing.first)
            if slot is None:
                return False
            self._write_piece(outgoing, slot)
            outgoing.num_written += 1
            self._pieces += 1
            # Memory order: the piece first, then its counter, then the bell.
            words[self._news + message_layout.PIECES] = self._pieces
            self._post.wake(self._reader)
        return True

    def _put(self, head: bytes, tensor: torch.Tensor) -> bool:
        """Writes a small message into the ring. False if there is no room."""
        num_bytes = tensor.nbytes
        return bool(core.put(self._address, head, tensor.data_ptr() if num_bytes else 0, num_bytes, 0, 0) == Code.DONE)

    def _begin(self, outgoing: _Message) -> bool:
        """Allocates a part for a large message and writes its record into the ring. False if there is no room."""
        num_bytes = outgoing.tensor.nbytes
        part_bytes = self._sizes.part_bytes(num_bytes)
        part = self._parts.take(part_bytes)
        if part is None:
            return False
        # No bell: the first piece follows and rings.
        if core.put(self._address, outgoing.head, 0, 0, part, part_bytes) != Code.DONE:
            self._parts.give_back(part)
            return False
        outgoing.part = part
        outgoing.has_begun = True
        outgoing.first = self._pieces
        outgoing.slots = message_layout.Slots(self._sizes.num_pieces(part_bytes))
        return True

    def _write_piece(self, outgoing: _Message, slot: int) -> None:
        tensor, piece_bytes = outgoing.tensor, self._sizes.piece_bytes
        done = outgoing.num_written * piece_bytes
        num_bytes = min(piece_bytes, tensor.nbytes - done)
        self._parts.write(tensor.data_ptr() + done, num_bytes, self._pieces, outgoing.part, slot)
