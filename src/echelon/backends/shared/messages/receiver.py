"""Receiving end of a link: the messages that one rank has written for this one.

Not locked: the backend calls it under its own lock. Only the death of a received tensor comes from any thread. A small
payload is taken out of the ring at once. A large one stays in the part that its sender writes. A receive with `out=`
copies it from there, piece by piece while it is still being written. Without `out=` the received tensor is that part
itself, which is freed when nothing refers to the tensor any more.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import weakref
from collections import deque
from functools import partial
from typing import Any

import torch

from echelon._native import PREFIX_BYTES, SPIN, Code, Inlet, core, message
from echelon.backends.delivery import IncomingMessage
from echelon.backends.formats import message_layout, wire
from echelon.backends.formats.arena import ARENA_BYTES, MIN_PART_BYTES
from echelon.backends.formats.wire import Tag
from echelon.backends.memory import as_bytes, describe, new_tensor, type_of
from echelon.backends.modes import normal_mode
from echelon.backends.shared.memory.mapping import add_lender
from echelon.backends.shared.messages import message_region
from echelon.backends.shared.messages.message_region import MessageRegion
from echelon.backends.tcp.inbox import Head, Inbox
from echelon.backends.tcp.link import Known, Receiver
from echelon.errors import EchelonError, ProtocolError, UnsupportedOp

# Received tensors may occupy this much of an arena. Beyond it they are copied, so that the sender does not run out of
# room.
_MAX_LENT_BYTES = 256 << 20
# Limit of the caches by header and by tag, which a peer fills.
_MAX_CACHED = 1024


class _Arrival:
    """Large message that is being written, or is written and not taken in yet."""

    def __init__(
        self, head: Head, delivery: IncomingMessage, part: message_layout.Part, parts: _Parts, first: int
    ) -> None:
        self.head = head
        self.delivery = delivery
        self.part = part
        self.first = first
        """Number of pieces that were written before its own."""
        self.num_pieces = parts.sizes.num_pieces(head.num_bytes)
        self.is_whole = part.num_bytes == head.num_bytes
        """Whether the part holds the entire message. Otherwise its pieces reuse the slots of the part."""
        self._parts = parts
        self._source = parts.memory(part)
        self._piece_bytes = parts.sizes.piece_bytes
        self._done = 0

    @property
    def is_copied(self) -> bool:
        """Whether the whole payload was copied, so the part is no longer needed."""
        return self._done == self.head.num_bytes

    @property
    def num_drained(self) -> int:
        """Number of pieces that this rank is done with, of this message and all earlier ones."""
        return self.first + (self.num_pieces if self.is_copied else self._done // self._piece_bytes)

    def copy(self, num_written: int) -> None:
        """Copies the next available piece into the receive buffer. Does nothing if there is no piece or no buffer.

        Raises:
            ProtocolError: the piece lies outside the part.
        """
        delivery, done = self.delivery, self._done
        number, begun = divmod(done, self._piece_bytes)
        if self.is_copied or number >= num_written or not delivery.is_placed:
            return
        room = delivery.room(done)
        if room is None and self.is_whole:
            return  # no buffer: the part becomes the tensor, or the message is dropped
        # No buffer from here on means a dropped message longer than its part: its pieces count as drained, uncopied, so
        # that the writer can end it.
        size = min(self._piece_bytes - begun, self.head.num_bytes - done)
        if room is not None:
            size = min(size, room.nbytes)
            # The slot word was stored by a peer: it is checked against the part before the copy.
            begin = self._parts.slot(self.first + number) * self._piece_bytes + begun
            if begin + size > self.part.num_bytes:
                raise ProtocolError(f"piece at {begin} of a part of {self.part.num_bytes} bytes")
            room[:size] = self._source[begin : begin + size]
        self._done += size
        delivery.wrote(self._done)


class RingReceiver(Receiver):
    """Reader of one peer's messages to this rank."""

    is_in_memory = True

    def __init__(self, at: MessageRegion, writer: int, max_message_bytes: int) -> None:
        """Starts without an arena, which is mapped at the first large message.

        Args:
            at: the region with ring and counters.
            writer: the other rank's number on this host.
            max_message_bytes: a longer message is a ProtocolError.
        """
        self._post = at
        self._writer = writer
        self._words = at.words
        self._sizes = at.sizes
        self._news = at.news(writer, at.number)
        self._answers = at.answers(writer, at.number)
        self._memory = at.region.memory
        self._ring = at.ring(writer, at.number)
        self._inlet = at.inlet(writer)
        self._address = ctypes.addressof(self._inlet)
        self._max_message_bytes = max_message_bytes
        self._pieces = 0
        self._arrival: _Arrival | None = None
        self.delivery: IncomingMessage | None = None
        self._parts: _Parts | None = None
        # Decoded headers by their bytes: most messages repeat one.
        self._heads: dict[bytes, Head] = {}
        self._latest: dict[Tag, tuple[Head, bytes]] = {}
        """Header of the last small point-to-point message with each tag, decoded and as bytes."""

    def take_in(self, inbox: Inbox) -> bool:  # noqa: D102
        if self._arrival is not None:
            return self._go_on(self._arrival)
        inlet = self._inlet
        code = core.find(self._address)
        if code == Code.WAITING or inbox.is_full():
            return False
        if code != Code.DONE:
            raise ProtocolError(
                f"record of {inlet.record_bytes} bytes, {inlet.available} of them there: "
                "the peer does not speak this protocol"
            )
        is_last = inlet.available == inlet.record_bytes
        self._open(inlet, inbox)
        core.release(self._address)
        return self._arrival is not None or not is_last

    def brings_memory(self, num_bytes: int) -> bool:  # noqa: D102
        # Between these sizes the message lies in its part as a whole, so the part can become the tensor.
        # Shorter ones have a part only if the ring is full.
        return self._sizes.inline_bytes < num_bytes <= self._sizes.whole_bytes

    def has_written(self) -> bool:  # noqa: D102
        return self._words[self._news + message_layout.RECORDS] != self._inlet.taken

    def look(self, seconds: float) -> bool:  # noqa: D102
        return bool(core.look(self._address, SPIN, int(seconds * 1e9)) == Code.DONE)

    def known(self, tag: Tag, note: str | None) -> Known | None:  # noqa: D102
        if (latest := self._latest.get(tag)) is None:
            return None
        head, data = latest
        if not (note is None or note == head.note):
            return None
        like = message(self._address, data, head.num_bytes, type_of(head.dtype), head.shape)
        what = describe(head.shape, head.dtype)
        return Known(partial(core.receive, like), head.shape, head.dtype, head.note, what, like)

    def fail(self, error: EchelonError) -> None:  # noqa: D102
        if self._arrival is not None:
            self._arrival.delivery.fail(error)
            self._arrival = self.delivery = None

    def _open(self, inlet: Inlet, inbox: Inbox) -> None:
        """Takes in the record that was found."""
        start = self._ring + inlet.head
        data = self._memory[start : start + inlet.head_bytes]
        head = self._head(data)
        if inlet.part_bytes:
            self._open_part(head, message_layout.Part(inlet.part, inlet.part_bytes), inbox)
            return
        # The peer wrote header and lengths: a payload must end inside its record.
        if inlet.payload + head.num_bytes > inlet.head - PREFIX_BYTES + inlet.record_bytes:
            raise ProtocolError(f"payload of {head.num_bytes} bytes in a record of {inlet.record_bytes}")
        # Messages of collectives are not kept: their tag has a new sequence number each time, so none would match.
        if not head.is_signed:
            if len(self._latest) >= _MAX_CACHED:
                self._latest.clear()
            self._latest[head.tag] = head, data
        inbox.take_small(head, inlet.ring + inlet.payload)

    def _head(self, data: bytes) -> Head:
        """Decodes a message's header. Cached, as most messages repeat one."""
        head = self._heads.get(data)
        if head is None:
            header, extra = data[: wire.HEADER_BYTES], data[wire.HEADER_BYTES :]
            if len(header) < wire.HEADER_BYTES or wire.extra_bytes(header) != len(extra):
                raise ProtocolError(f"header of {len(data)} bytes: the peer does not speak this protocol")
            head = Head.of(wire.decode(header, extra, self._max_message_bytes))
            if len(self._heads) >= _MAX_CACHED:
                self._heads.clear()
            self._heads[data] = head
        return head

    def _open_part(self, head: Head, part: message_layout.Part, inbox: Inbox) -> None:
        size = head.num_bytes
        expected = self._sizes.part_bytes(size)
        # The peer wrote offset and length: both are checked before the arena is read.
        lies_inside = part.start % MIN_PART_BYTES == 0 and part.start + expected <= ARENA_BYTES
        if size <= self._sizes.small_bytes or part.num_bytes != expected or not lies_inside:
            raise ProtocolError(f"payload of {size} bytes in a part of {part.num_bytes} at {part.start}")
        if self._parts is None:
            self._parts = _Parts(self._post, self._writer, self._inlet)
        self.delivery = inbox.open(head, comes_whole=expected == size)
        self._arrival = _Arrival(head, self.delivery, part, self._parts, self._pieces)

    def _go_on(self, arrival: _Arrival) -> bool:
        drained = arrival.num_drained
        while True:
            # The counter is read anew for each piece: the sender writes the next one while this rank copies.
            written = min(self._words[self._news + message_layout.PIECES] - arrival.first, arrival.num_pieces)
            arrival.copy(written)
            if arrival.num_drained == drained:
                break
            drained = self._words[self._answers + message_layout.DRAINED] = arrival.num_drained
            core.answer(self._address)
        if written < arrival.num_pieces or not (arrival.is_whole or arrival.is_copied):
            return False
        self._end(arrival)
        return True

    def _end(self, arrival: _Arrival) -> None:
        self._arrival = self.delivery = None
        self._pieces += arrival.num_pieces
        assert self._parts is not None
        delivery, part = arrival.delivery, arrival.part
        if arrival.is_copied or delivery.is_dropped:
            self._parts.free(part.start)
            delivery.finish()
            return
        try:
            whole = self._parts.lend(part, arrival.head.shape, arrival.head.dtype)
        except UnsupportedOp as error:
            delivery.fail(error)
        else:
            delivery.finish(whole)


class _Parts:
    """Arena that one peer writes for this rank."""

    def __init__(self, at: MessageRegion, writer: int, inlet: Inlet) -> None:
        self.sizes = at.sizes
        self._window, self._words = at.map_arena(writer, at.number)
        self._line_words = at.words
        self._freed = at.answers(writer, at.number) + message_layout.FREED
        # Numbers of freed parts. `next` is one step of the interpreter, so a thread that frees needs no lock, not even
        # if it interrupts another one in the same function.
        self._numbers = itertools.count()
        self._post = at  # with the words and the bell that the inlet refers to
        self._inlet = inlet
        self._address = ctypes.addressof(inlet)
        self._process = os.getpid()
        self._lent: dict[int, weakref.ref[Any]] = {}
        add_lender(self)
        self._lent_bytes = 0
        # Parts whose tensors died since, in any thread. Only `lend` counts them, under the backend's lock.
        self._returned: deque[message_layout.Part] = deque()

    def slot(self, piece: int) -> int:
        """Returns the slot of a piece in its part."""
        return self._words[message_region.SLOT_WORDS + piece % message_region.NUM_SLOT_WORDS]

    def memory(self, part: message_layout.Part) -> memoryview:
        """Returns the bytes of a part."""
        begin = message_region.PARTS + part.start
        return memoryview(self._window.memory)[begin : begin + part.num_bytes]

    def lend(self, part: message_layout.Part, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a received message as a tensor over its part.

        The part is freed when nothing refers to the tensor any more. Returns a copy if the received tensors of this
        peer would exceed 256 MiB.

        Raises:
            UnsupportedOp: there is no memory for the copy. The part is free then.
        """
        self._count_returned()
        memory = self.memory(part)
        with normal_mode():
            tensor = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
        # The sender needs free parts to go on, so a receiver that keeps its messages pays for a copy beyond 256 MiB.
        if self._lent_bytes + part.num_bytes > _MAX_LENT_BYTES:
            try:
                copy = new_tensor(shape, dtype)
                as_bytes(copy).copy_(as_bytes(tensor))
            finally:
                self.free(part.start)
            return copy
        self._lent_bytes += part.num_bytes
        self._lent[part.start] = weakref.ref(memory, lambda _: self._return(part))
        return tensor

    def loans(self) -> list[memoryview]:
        """Returns the parts that are tensors now. A forked child gets copies of them."""
        return [memory for part in tuple(self._lent.values()) if (memory := part()) is not None]

    def free(self, start: int) -> None:
        """Gives a part back to its writer."""
        number = next(self._numbers)
        # Memory order: the freed word first, then the counter that tells of it, then the bell.
        self._words[number % message_region.NUM_FREED_WORDS] = message_layout.freed_word(
            number, start // MIN_PART_BYTES
        )
        self._line_words[self._freed] = number + 1
        core.answer(self._address)

    def _return(self, part: message_layout.Part) -> None:
        """Frees a part when its last tensor dies, in any thread."""
        if os.getpid() != self._process:
            return  # a forked child dropped its private copy; the parent still has the tensor
        self._returned.append(part)
        self.free(part.start)

    def _count_returned(self) -> None:
        while self._returned:
            part = self._returned.popleft()
            self._lent_bytes -= part.num_bytes
            self._lent.pop(part.start, None)
