"""What ranks of one host tell each other about their messages: words and records. Pure arithmetic.

Each rank, the *writer*, has for each other, the *reader*:

    news        64 bytes  words that the writer stores, in the reader's row of news
        0  records   bytes of records that are in the ring
        1  pieces    pieces of large messages that are written, of all messages together
        2  waiting   1 while the writer waits for answers, because something has no room
    answers     64 bytes  words that the reader stores, in the writer's row of answers
        0  taken     bytes of records that were taken out of the ring, told when they are a quarter of it
        1  drained   pieces that the reader is done with, of all messages together
        2  freed     changes whenever a part of the arena was freed
    ring        256 KiB   records, one behind the other; each is the head of a message, a small one's payload included
    arena       1 GiB     parts, in which the payload of a large message stands
        freed   a word for each of the last parts that the reader has freed, which it stores: how many, and which part
        slots   a word for each of the last pieces, which the writer stores: in which slot of its part it is

Strategy. Data first, word second, on both sides. A record is put where it fits between the last one and the first that
is not taken; the end of the ring is passed over where it is too short. A large message begins with its record, then its
pieces follow, each counted when it is there, so the reader copies one while the next is written; the record of the next
message comes after its last piece. A piece goes into a slot whose piece is drained, if there is one, because that is in
the cache; else into the next slot that was not used. So a message that nobody copies while it is written lies in its
part as a whole. Only one that is longer than its part waits for slots. When the reader is done with a part, it writes
that into the next word of those that were freed, one round behind another. Each word has its number in it, so the
writer knows whether the next one is there: parts are freed by whatever thread lets go of a tensor, and one may be later
than the next.
"""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

from echelon.backends.formats.wire import HEADER_BYTES, MAX_DIMS, MAX_NOTE_BYTES
from echelon.errors import ProtocolError

WORDS_BYTES = 64
"""Of the news or the answers of two ranks: a cache line, because another rank writes the next."""
NUM_WORDS = WORDS_BYTES // 8
RECORDS, PIECES, WAITING = range(3)
TAKEN, DRAINED, FREED = range(3)

ALIGNMENT = 64
"""Of records."""


class Sizes(NamedTuple):
    """How large what is.

    ring_bytes: of a ring. inline_bytes: the largest payload that stands in its record. piece_bytes: how much of a large
    message is written or copied at a time, a multiple of every dtype's size. whole_bytes: the longest message whose
    part is as long. circle_bytes: of the part of a longer one, a multiple of piece_bytes. Below 1 MiB the two ends wait
    for each other, above 16 MiB the pieces leave the cache.
    """

    ring_bytes: int
    inline_bytes: int
    piece_bytes: int
    whole_bytes: int
    circle_bytes: int

    def num_pieces(self, num_bytes: int) -> int:
        """Returns in how many pieces so much is written."""
        return -(-num_bytes // self.piece_bytes)

    def part_bytes(self, payload_bytes: int) -> int:
        """Returns how long the part of a large message is."""
        return payload_bytes if payload_bytes <= self.whole_bytes else self.circle_bytes


class Slots:
    """Where in its part the pieces of one message go."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._used: list[int] = []
        """The slot of each piece that was written."""
        self._num_fresh = 0
        self._num_drained = 0

    def next(self, num_drained: int) -> int | None:
        """Returns the slot of the next piece; None: there is none before the reader has drained more.

        Args:
            num_drained: how many pieces of the message the reader has drained; below 0 while it is still busy with an
                earlier one.

        Raises:
            ProtocolError: it cannot have drained so many.
        """
        if num_drained > len(self._used):
            raise ProtocolError(
                f"{num_drained} of {len(self._used)} pieces drained: the peer does not speak this protocol"
            )
        if num_drained > self._num_drained:
            slot = self._used[self._num_drained]
            self._num_drained += 1
        elif self._num_fresh < self._num_slots:
            slot = self._num_fresh
            self._num_fresh += 1
        else:
            return None
        self._used.append(slot)
        return slot


SIZES = Sizes(512 << 10, 64 << 10, 256 << 10, 16 << 20, 4 << 20)

_PREFIX = struct.Struct("<IIQQ")
_PAYLOAD_ALIGNMENT = 16
_MAX_HEAD_BYTES = HEADER_BYTES + 8 * MAX_DIMS + MAX_NOTE_BYTES


class Prefix(NamedTuple):
    """What a record begins with.

    record_bytes: all of it; head_bytes: of the head behind this, 0 where the end of the ring is passed over. part,
    part_bytes: where in the arena a large message stands; 0 if the payload follows the head.
    """

    record_bytes: int
    head_bytes: int
    part: int = 0
    part_bytes: int = 0

    def encode(self) -> bytes:
        """Returns it as bytes."""
        return _PREFIX.pack(*self)


PREFIX_BYTES = _PREFIX.size

_MAX_PARTS = 1 << 16


def freed_word(number: int, part: int) -> int:
    """Returns the word that says which part, of fewer than 65536, was freed as number `number`, from 0 on."""
    return (number + 1) * _MAX_PARTS + part


def freed_part(word: int, number: int) -> int | None:
    """Returns which part was freed as that number; None: none was, the word is from a round before."""
    return word % _MAX_PARTS if word // _MAX_PARTS == number + 1 else None


class Place(NamedTuple):
    """Where a record goes."""

    start: int
    """In the ring."""
    skip: int
    """How many bytes before it are passed over."""


def payload_at(head_bytes: int) -> int:
    """Returns where in a record its payload begins."""
    return _up(PREFIX_BYTES + head_bytes, _PAYLOAD_ALIGNMENT)


def record_bytes(head_bytes: int, payload_bytes: int) -> int:
    """Returns how long a record is."""
    return _up(payload_at(head_bytes) + payload_bytes, ALIGNMENT)


class SmallRecord(NamedTuple):
    """That of a message whose payload stands in it."""

    size: int
    payload_at: int
    start: bytes
    """Prefix and head."""


@functools.lru_cache(1024)
def small_record(head: bytes, payload_bytes: int) -> SmallRecord:
    """Returns the record of a message, as of most that were sent before."""
    size = record_bytes(len(head), payload_bytes)
    return SmallRecord(size, payload_at(len(head)), Prefix(size, len(head)).encode() + head)


def place_for(size: int, records: int, taken: int, ring_bytes: int) -> Place | None:
    """Returns where a record of `size` bytes goes; None: it does not fit before more is taken.

    Args:
        size: a multiple of ALIGNMENT.
        records: bytes put into the ring so far.
        taken: bytes taken out of it so far.
        ring_bytes: of the whole ring.
    """
    at = records % ring_bytes
    skip = ring_bytes - at if at + size > ring_bytes else 0
    if records + skip + size - taken > ring_bytes:
        return None
    return Place(0 if skip else at, skip)


def read_prefix(data: bytes, available: int, at: int, ring_bytes: int) -> Prefix:
    """Returns what a record begins with.

    Args:
        data: its first PREFIX_BYTES bytes.
        available: how many bytes of records there are to be taken.
        at: where in the ring it begins.
        ring_bytes: of the whole ring.

    Raises:
        ProtocolError: it cannot be a record.
    """
    prefix = _decode(data)
    size = prefix.record_bytes
    whole = 0 < size <= min(available, ring_bytes - at) and size % ALIGNMENT == 0
    if not whole or available > ring_bytes or prefix.head_bytes > min(_MAX_HEAD_BYTES, size - PREFIX_BYTES):
        raise ProtocolError(f"record of {size} bytes, {available} of them there: the peer does not speak this protocol")
    return prefix


@functools.lru_cache(256)
def _decode(data: bytes) -> Prefix:
    return Prefix(*_PREFIX.unpack(data))  # mostly that of a message before


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
