"""Shared memory for the messages of one host, and wake-ups between its ranks. `message_layout` defines the counters.

    the first rank's range   | news | answers | asleep | rings |    one region, mapped by all ranks
    every rank's range       | (room of the region) | arena for rank 0 | arena for rank 1 | ...

Strategy. A waiting rank polls its own row of news, which all its peers write, and its row of answers while a message of
its own has no room. Before it sleeps, it makes its `asleep` word odd, passes a fence, and polls once more. A writer
stores its news, passes a fence, reads the reader's `asleep` word, and rings its doorbell (eventfd) if it is odd. So
either the reader sees the news or the writer sees the sleeper.

Answers work alike, except that nobody rings for them unless the writer has set its `waiting` counter. Once it has, it
checks for room again, since another thread of its rank may be asleep already. The sleeper polls the doorbell with its
other files: its connections and its peers' processes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import NamedTuple

from echelon._native import NO_FD, Bell, Inlet, Outlet, Words, core
from echelon.backends.formats import message_layout
from echelon.backends.formats.arena import ARENA_BYTES, MIN_PART_BYTES
from echelon.backends.shared.memory.segment import RANGE_BYTES, Segment, Window, words_of

# As many as there can be parts, so as many as there can be pieces that the reader is not done with.
NUM_SLOT_WORDS = ARENA_BYTES // MIN_PART_BYTES
# As many as there can be parts, so no word is stored again before the writer has read it.
NUM_FREED_WORDS = ARENA_BYTES // MIN_PART_BYTES
SLOT_WORDS = NUM_FREED_WORDS
"""Index of the first slot word in an arena's window. The words of freed parts come before it."""
PARTS = (SLOT_WORDS + NUM_SLOT_WORDS) * 8
"""Offset of the parts in an arena's window, in bytes."""
_ROOM_OF_ARENA = PARTS + ARENA_BYTES
_PAGE_BYTES = 64 << 10


class ArenaWindow(NamedTuple):
    """Arena as mapped by one rank."""

    window: Window
    words: Words
    """The window as 64-bit numbers."""


class Doorbells:
    """Eventfds with which the ranks of one host wake each other, one for each."""

    def __init__(self, fds: Sequence[int], number: int, asleep: Sequence[int]) -> None:
        """Takes over the files.

        Args:
            fds: by rank.
            number: of this rank.
            asleep: addresses of the words that say whether a rank sleeps, by rank.
        """
        self.own = fds[number]
        """The eventfd that wakes this rank."""
        self._fds = fds
        self._bells = [Bell(asleep=word, fd=fd) for word, fd in zip(asleep, fds, strict=True)]
        self.addresses = [ctypes.addressof(bell) for bell in self._bells]
        """Of the bells in this process, for the native library, which rings them."""

    def close(self) -> None:
        """Closes the files."""
        fds, self._fds = self._fds, ()
        # First: a closed file's number may be another file's a moment later. The library rings, as this statement runs,
        # with the interpreter's lock held.
        for bell in self._bells:
            bell.fd = NO_FD
        for fd in fds:
            os.close(fd)


class MessageRegion:
    """Region with the counters and rings of all pairs of one host, as one rank maps it."""

    def __init__(
        self,
        segment: Segment,
        number: int,
        doorbells: Sequence[int],
        sizes: message_layout.Sizes = message_layout.SIZES,
    ) -> None:
        """Allocates this rank's share of the segment and maps the region.

        Args:
            segment: of this host; nothing may have been allocated from it yet.
            number: of this rank among those of the host.
            doorbells: an eventfd for each rank of the host.
            sizes: of rings, records and parts; the same on all ranks.
        """
        self.sizes = sizes
        # Every rank allocates the same sizes first, so offsets of region and arenas are known without an exchange.
        segment.allocate(_region_bytes(len(doorbells), sizes) + len(doorbells) * _ROOM_OF_ARENA)
        self.number = number
        self.num_ranks = len(doorbells)
        self._segment = segment
        region = segment.map(0, _region_bytes(self.num_ranks, sizes))
        self.region = region
        self.words = words_of(region)
        # One row is contiguous, so a poll of all peers is a single slice and comparison.
        row = self.num_ranks * message_layout.WORDS_BYTES
        answers = (self.num_ranks + number) * row
        self._news = slice(number * row, (number + 1) * row)
        self._answers = slice(answers, answers + row)
        asleep = [2 * self.num_ranks * row // 8 + rank * message_layout.NUM_WORDS for rank in range(self.num_ranks)]
        self._own_asleep = asleep[number]
        self.doorbells = Doorbells(doorbells, number, [self.address(word) for word in asleep])
        self._seen_news = self._seen_answers = bytes(row)  # zeros, not a read: a peer may have written already
        self.num_waiting = 0
        """Number of senders that wait for answers."""

    def news(self, writer: int, reader: int) -> int:
        """Returns the index of the first counter that `writer` stores for `reader`."""
        return (reader * self.num_ranks + writer) * message_layout.NUM_WORDS

    def answers(self, writer: int, reader: int) -> int:
        """Returns the index of the first counter that `reader` stores for `writer`."""
        return ((self.num_ranks + writer) * self.num_ranks + reader) * message_layout.NUM_WORDS

    def ring(self, writer: int, reader: int) -> int:
        """Returns the offset of a ring in the region."""
        first = _words_bytes(self.num_ranks)
        return first + (writer * self.num_ranks + reader) * self.sizes.ring_bytes

    def map_arena(self, writer: int, reader: int) -> ArenaWindow:
        """Maps an arena: the words of freed parts, the slot words, then the parts, see `PARTS`."""
        offset = writer * RANGE_BYTES + _region_bytes(self.num_ranks, self.sizes) + reader * _ROOM_OF_ARENA
        window = self._segment.map(offset, _ROOM_OF_ARENA)
        return ArenaWindow(window, words_of(window))

    @property
    def is_full(self) -> bool:
        """Whether a queued message has no room in its ring or arena."""
        return self.num_waiting > 0

    def address(self, word: int) -> int:
        """Returns the address of a word in this process."""
        return self.region.address + 8 * word

    def wake(self, rank: int) -> None:
        """Wakes a rank if it sleeps. Called after its news were stored."""
        core.wake(self.doorbells.addresses[rank])

    def outlet(self, reader: int) -> Outlet:
        """Returns the writing end of this rank's ring for `reader`."""
        return Outlet(
            ring=self.region.address + self.ring(self.number, reader),
            ring_bytes=self.sizes.ring_bytes,
            small_bytes=self.sizes.small_bytes,
            records_word=self.address(self.news(self.number, reader) + message_layout.RECORDS),
            taken_word=self.address(self.answers(self.number, reader) + message_layout.TAKEN),
            bell=self.doorbells.addresses[reader],
        )

    def inlet(self, writer: int) -> Inlet:
        """Returns the reading end of the ring that `writer` has for this rank."""
        news = self.news(writer, self.number)
        return Inlet(
            ring=self.region.address + self.ring(writer, self.number),
            ring_bytes=self.sizes.ring_bytes,
            records_word=self.address(news + message_layout.RECORDS),
            taken_word=self.address(self.answers(writer, self.number) + message_layout.TAKEN),
            waiting_word=self.address(news + message_layout.WAITING),
            bell=self.doorbells.addresses[writer],
            most_head_bytes=message_layout.MAX_HEAD_BYTES,
        )

    # Polling

    def has_news(self) -> bool:
        """Whether a peer has stored news since `look`, or an answer that this rank waits for."""
        memory = self.region.memory
        return memory[self._news] != self._seen_news or (
            self.num_waiting > 0 and memory[self._answers] != self._seen_answers
        )

    def look(self) -> bool:
        """Snapshots the peers' counters. True if they changed since the last snapshot.

        Called before messages are taken in: messages that arrive meanwhile then count as news at the next poll.
        """
        memory = self.region.memory
        news, answers = memory[self._news], memory[self._answers]
        # Memory order: these reads before those of the words that the counters tell of. Without it, 4 of 2000 orders of
        # `both ways, with cores` missed a part that was freed.
        fence()
        has_news = news != self._seen_news or (self.num_waiting > 0 and answers != self._seen_answers)
        self._seen_news, self._seen_answers = news, answers
        return has_news

    def look_again(self) -> None:
        """Invalidates the snapshot, because some messages were left in the rings."""
        self._seen_news = b""

    def fall_asleep(self) -> bool:
        """Marks this rank as asleep. True if it may sleep, False if there is news."""
        # The next odd number: never that of an earlier sleep, for which a peer may have rung already.
        self.words[self._own_asleep] = (self.words[self._own_asleep] + 1) | 1
        fence()
        return not self.has_news()

    def wake_up(self) -> None:
        """Marks this rank as awake again."""
        self.words[self._own_asleep] = (self.words[self._own_asleep] | 1) + 1


def fence() -> None:
    """Makes all earlier stores of this thread visible to other processes before any later load."""
    core.fence()


def _words_bytes(num_ranks: int) -> int:
    size = num_ranks * (2 * num_ranks + 1) * message_layout.WORDS_BYTES
    # Whole pages, of the largest that there are (ARM), so rings and arenas begin at a page.
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def _region_bytes(num_ranks: int, sizes: message_layout.Sizes) -> int:
    return _words_bytes(num_ranks) + num_ranks * num_ranks * sizes.ring_bytes
