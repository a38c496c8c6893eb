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
    ring        2 MiB     records, one behind the other: each a message's header, and its payload unless that is large
    arena       1 GiB     parts, each with the payload of one large message
        freed   words that the reader stores: for each of the last parts that it freed, its number and which part
        slots   words that the writer stores: for each of the last pieces, its slot in its part

    record      a multiple of 64 bytes
        0   its length, then that of the header (32 bits each); 0 of header: the end of the ring is skipped
        8   offset and length of a large message's part in the arena, 0 if the payload follows the header
        24  header, then the payload, at a multiple of 16 bytes

Strategy. Single producer, single consumer; both store data first and the counter second. A record goes between the last
one and the first that is not taken; where the end of the ring is too short, it is skipped. The native library writes
and reads records (`native/messages.c`). A large message begins with its record. Its pieces follow, each counted once it
is written, so the reader copies one while the next is written; the next message's record comes after its last piece.

A piece goes into the slot of a drained piece if there is one, as that memory is in the cache, else into the next unused
slot. So a message that nobody copies meanwhile lies in its part as a whole. Only a message longer than its part waits
for slots.

The reader frees a part by storing its index in the next of the freed words, which it uses in turn. Each word holds its
own number, so the writer knows whether the next one is there: any thread that drops a tensor frees its part, and one
thread may be slower than the next.
"""

from __future__ import annotations

from typing import NamedTuple

from echelon.backends.formats.wire import HEADER_BYTES, MAX_DIMS, MAX_NOTE_BYTES
from echelon.errors import ProtocolError

# A cache line, so that ranks which store neighbouring counters do not share one.
WORDS_BYTES = 64
"""Size of one pair's news, and of its answers."""
NUM_WORDS = WORDS_BYTES // 8
RECORDS, PIECES, WAITING = range(3)
TAKEN, DRAINED, FREED = range(3)


class Sizes(NamedTuple):
    """Sizes of the buffers, in bytes.

    ring_bytes: of a ring. small_bytes: the largest payload that always lies in its record. inline_bytes: the largest
    one that does so while half of the ring stays free; else it gets a part. piece_bytes: amount of a message in a
    part that is written or copied at a time, a multiple of every dtype's size. whole_bytes: the longest message whose
    part is as long. circle_bytes: the part of a longer message, whose pieces reuse its slots; a multiple of
    piece_bytes.
    """

    ring_bytes: int
    small_bytes: int
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


# Records up to half a ring fit an empty ring wherever it begins. A part takes Python 150 us more than a record, so
# messages get one from where copies take that long. circle_bytes: below 1 MiB the two ends wait for each other, above
# 16 MiB the pieces leave the cache.
SIZES = Sizes(2 << 20, 64 << 10, 256 << 10, 256 << 10, 16 << 20, 4 << 20)

MAX_HEAD_BYTES = HEADER_BYTES + 8 * MAX_DIMS + MAX_NOTE_BYTES
"""Longest header of a message."""


class Part(NamedTuple):
    """Place of a large message in the arena, in bytes."""

    start: int
    num_bytes: int


_MAX_PARTS = 1 << 16


def freed_word(number: int, part: int) -> int:
    """Returns the word for part number `part`, below 65536, freed as number `number`, from 0 on."""
    return (number + 1) * _MAX_PARTS + part


def freed_part(word: int, number: int) -> int | None:
    """Returns the part freed as `number`. None if the word is still that of the round before."""
    return word % _MAX_PARTS if word // _MAX_PARTS == number + 1 else None
