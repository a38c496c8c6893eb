"""Layout of the messages between two ranks of one host: counters, ring records, arena parts. Pure arithmetic.

Each rank, the *writer*, has for each other rank, the *reader*:

    news        64 bytes  the writer's counters, in the reader's row of news
        0  records   bytes of records that are in the ring
        1  pieces    pieces of large messages that are written, of all messages together
        2  waiting   1 while the writer waits for answers, because a message has no room
    answers     64 bytes  the reader's counters, in the writer's row of answers
        0  taken     bytes of records taken out of the ring, published at every quarter of the ring
        1  drained   pieces that the reader is done with, of all messages together
        2  freed     changes whenever a part of the arena was freed
    ring        512 KiB   records, one behind the other: each a message's header, and the payload of a small message
    arena       1 GiB     parts, each with the payload of one large message
        freed   words that the reader stores: for each of the last parts that it freed, its number and which part
        slots   words that the writer stores: for each of the last pieces, its slot in its part

Strategy. Single producer, single consumer; both store data first and the counter second. A record goes between the last
one and the first that is not taken; where the end of the ring is too short, it is skipped. A large message begins with
its record. Its pieces follow, each counted once it is written, so the reader copies one while the next is written; the
next message's record comes after its last piece.

A piece goes into the slot of a drained piece if there is one, as that memory is in the cache, else into the next unused
slot. So a message that nobody copies meanwhile lies in its part as a whole. Only a message longer than its part waits
for slots.

The reader frees a part by storing its index in the next of the freed words, which it uses in turn. Each word holds its
own number, so the writer knows whether the next one is there: any thread that drops a tensor frees its part, and one
thread may be slower than the next.
"""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

from echelon.backends.formats.wire import HEADER_BYTES, MAX_DIMS, MAX_NOTE_BYTES
from echelon.errors import ProtocolError

# A cache line, so that ranks which store neighbouring counters do not share one.
WORDS_BYTES = 64
"""Size of one pair's news, and of its answers."""
NUM_WORDS = WORDS_BYTES // 8
RECORDS, PIECES, WAITING = range(3)
TAKEN, DRAINED, FREED = range(3)

# Also leaves room for the prefix of a skipped end: what is left before the end of the ring is a multiple of it.
ALIGNMENT = 64
"""Of records in the ring, in bytes."""


class Sizes(NamedTuple):
    """Sizes of the buffers, in bytes.

    ring_bytes: of a ring. inline_bytes: the largest payload that lies in its record. piece_bytes: amount of a large
    message that is written or copied at a time, a multiple of every dtype's size. whole_bytes: the longest message
    whose part is as long. circle_bytes: the part of a longer message, whose pieces reuse its slots; a multiple of
    piece_bytes.
    """

    ring_bytes: int
    inline_bytes: int
    piece_bytes: int
    whole_bytes: int
    circle_bytes: int

    def num_pieces(self, num_bytes: int) -> int:
        """Returns the number of pieces of a payload."""
        return -(-num_bytes // self.piece_bytes)

    def part_bytes(self, payload_bytes: int) -> int:
        """Returns the length of the part of a large message."""
        return payload_bytes if payload_bytes <= self.whole_bytes else self.circle_bytes


class Slots:
    """Slot of each piece of one message in its part."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._used: list[int] = []
        """Slot of each written piece."""
        self._num_fresh = 0
        self._num_drained = 0

    def next(self, num_drained: int) -> int | None:
        """Returns the slot of the next piece. None until the reader has drained more.

        Args:
            num_drained: pieces of the message that the reader has drained; below 0 while it is still at an earlier
                message.

        Raises:
            ProtocolError: the reader claims more pieces than were written.
        """
        if num_drained > len(self._used):
            raise ProtocolError(
                f"{num_drained} of {len(self._used)} pieces drained: the peer does not speak this protocol"
            )
        if num_drained > self._num_drained:
            # Reused before a fresh slot: a drained slot is still in the cache.
            slot = self._used[self._num_drained]
            self._num_drained += 1
        elif self._num_fresh < self._num_slots:
            slot = self._num_fresh
            self._num_fresh += 1
        else:
            return None
        self._used.append(slot)
        return slot


# Records up to half a ring fit an empty ring wherever it begins; 64 KiB inline leaves room for several messages.
# circle_bytes: below 1 MiB the two ends wait for each other, above 16 MiB the pieces leave the cache.
SIZES = Sizes(512 << 10, 64 << 10, 256 << 10, 16 << 20, 4 << 20)

_PREFIX = struct.Struct("<IIQQ")
_PAYLOAD_ALIGNMENT = 16
_MAX_HEAD_BYTES = HEADER_BYTES + 8 * MAX_DIMS + MAX_NOTE_BYTES


class Prefix(NamedTuple):
    """First bytes of a record.

    record_bytes: length of the whole record. head_bytes: length of the header behind the prefix, 0 where the end of the
    ring is skipped. part, part_bytes: offset and length of a large message's part in the arena, 0 if the payload
    follows the header.
    """

    record_bytes: int
    head_bytes: int
    part: int = 0
    part_bytes: int = 0

    def encode(self) -> bytes:
        """Returns the prefix as bytes."""
        return _PREFIX.pack(*self)


PREFIX_BYTES = _PREFIX.size

_MAX_PARTS = 1 << 16


def freed_word(number: int, part: int) -> int:
    """Returns the word for part number `part`, below 65536, freed as number `number`, from 0 on."""
    return (number + 1) * _MAX_PARTS + part


def freed_part(word: int, number: int) -> int | None:
    """Returns the part freed as `number`. None if the word is still that of the round before."""
    return word % _MAX_PARTS if word // _MAX_PARTS == number + 1 else None


class Place(NamedTuple):
    """Position of a record in the ring."""

    start: int
    """Offset of the record."""
    skip: int
    """Bytes before the end of the ring that are skipped."""


def payload_at(head_bytes: int) -> int:
    """Returns the offset of the payload in a record."""
    return _up(PREFIX_BYTES + head_bytes, _PAYLOAD_ALIGNMENT)


def record_bytes(head_bytes: int, payload_bytes: int) -> int:
    """Returns the length of a record."""
    return _up(payload_at(head_bytes) + payload_bytes, ALIGNMENT)


class SmallRecord(NamedTuple):
    """Record that contains its whole message."""

    size: int
    payload_at: int
    start: bytes
    """Prefix and header."""


# Most messages repeat an earlier header, so their prefix need not be encoded again.
@functools.lru_cache(1024)
def small_record(head: bytes, payload_bytes: int) -> SmallRecord:
    """Returns the record of a small message, cached."""
    size = record_bytes(len(head), payload_bytes)
    return SmallRecord(size, payload_at(len(head)), Prefix(size, len(head)).encode() + head)


def place_for(size: int, records: int, taken: int, ring_bytes: int) -> Place | None:
    """Returns the position of a record of `size` bytes. None if it does not fit before more is taken.

    Args:
        size: a multiple of ALIGNMENT.
        records: bytes of records put into the ring so far.
        taken: bytes of records taken out of it so far.
        ring_bytes: of the whole ring.
    """
    # Both count bytes since the start, in 64 bits, so they do not wrap in the life of a job.
    at = records % ring_bytes
    skip = ring_bytes - at if at + size > ring_bytes else 0
    if records + skip + size - taken > ring_bytes:
        return None
    return Place(0 if skip else at, skip)


def read_prefix(data: bytes, available: int, at: int, ring_bytes: int) -> Prefix:
    """Decodes and checks the prefix of a record.

    Args:
        data: the first PREFIX_BYTES bytes of the record.
        available: bytes of records that are ready to be taken.
        at: offset of the record in the ring.
        ring_bytes: of the whole ring.

    Raises:
        ProtocolError: it cannot be a record.
    """
    prefix = _decode(data)
    size = prefix.record_bytes
    # A peer wrote the size: it is checked against ring and counters before any byte behind the prefix is read.
    whole = 0 < size <= min(available, ring_bytes - at) and size % ALIGNMENT == 0
    if not whole or available > ring_bytes or prefix.head_bytes > min(_MAX_HEAD_BYTES, size - PREFIX_BYTES):
        raise ProtocolError(f"record of {size} bytes, {available} of them there: the peer does not speak this protocol")
    return prefix


@functools.lru_cache(256)
def _decode(data: bytes) -> Prefix:
    return Prefix(*_PREFIX.unpack(data))  # cached: most prefixes repeat an earlier message's


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
