"""Where the words, rings and arenas of all lines are, and how ranks wake each other. See `mail` for what they mean.

    the first rank's range   | news | answers | asleep | rings |    one region, mapped by all ranks
    every rank's range       | (room of the region) | arena for rank 0 | arena for rank 1 | ...

Strategy. A rank that waits reads its own row of news, in which all its peers write, again and again; and that of
answers, while something of its own has no room. Before it sleeps it makes its `asleep` word odd, and looks once more,
behind a fence; who has written news looks behind a fence whether the reader sleeps, and rings its doorbell (eventfd) if
it does. So either the one sees the news or the other that it sleeps. With answers it is the same, but that nobody rings
for them unless the writer has said that it waits; once it has, it looks for room again, since another thread of its
rank may sleep already. The doorbell is among the files that the sleeper polls, with its connections and its peers'
processes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

from echelon.backends.formats import message_layout
from echelon.backends.formats.arena import ARENA_BYTES, MIN_PART_BYTES
from echelon.backends.shared.memory.segment import RANGE_BYTES, Segment, Window

NUM_SLOT_WORDS = ARENA_BYTES // MIN_PART_BYTES
"""As many as there can be parts, so as many as there can be pieces that the reader is not done with."""
NUM_FREED_WORDS = ARENA_BYTES // MIN_PART_BYTES
"""As many as there can be parts, so none is stored again before the writer has seen it."""
SLOT_WORDS = NUM_FREED_WORDS
"""Index of the first word of slots in an arena's window; before them are those of parts that were freed."""
PARTS = (SLOT_WORDS + NUM_SLOT_WORDS) * 8
"""Where in the window of an arena its parts begin."""
_ROOM_OF_ARENA = PARTS + ARENA_BYTES


class ArenaWindow(NamedTuple):
    """An arena as one rank maps it."""

    window: Window
    words: memoryview
    """The window as 64-bit numbers."""


class MessageRegion:
    """The region of all lines, as one rank maps it."""

    def __init__(
        self,
        segment: Segment,
        number: int,
        doorbells: Sequence[int],
        sizes: message_layout.Sizes = message_layout.SIZES,
    ) -> None:
        """Maps the region.

        Args:
            segment: of this host, of which nothing was given out yet.
            number: of this rank among those of the host.
            doorbells: an eventfd for each of them.
            sizes: of what messages stand in, the same on all ranks.
        """
        self.sizes = sizes
        segment.allocate(_region_bytes(len(doorbells), sizes) + len(doorbells) * _ROOM_OF_ARENA)
        self.number = number
        self.num_ranks = len(doorbells)
        self._segment = segment
        self._doorbells = doorbells
        region = segment.map(0, _region_bytes(self.num_ranks, sizes))
        self.region = region
        self.words = memoryview(region.memory).cast("Q")
        """The region as 64-bit numbers."""
        row = self.num_ranks * message_layout.WORDS_BYTES
        answers = (self.num_ranks + number) * row
        self._news = slice(number * row, (number + 1) * row)
        self._answers = slice(answers, answers + row)
        self._asleep_words = 2 * self.num_ranks * row // 8
        self._own_asleep = self._asleep_words + number * message_layout.NUM_WORDS
        self._seen_news = self._seen_answers = bytes(row)  # a peer may have written before this
        self._rung = [0] * self.num_ranks
        """Of each rank, in which of its sleeps this one has rung for it. Once is enough, and takes 20 us."""
        self._ringing = threading.RLock()  # what rings may be the end of a tensor, in the very thread that closes
        self.num_waiting = 0
        """How many outlets wait for answers."""

    @property
    def doorbell(self) -> int:
        """The eventfd that rings for this rank."""
        return self._doorbells[self.number]

    def news(self, writer: int, reader: int) -> int:
        """Returns the index of the first word of what a writer tells a reader."""
        return (reader * self.num_ranks + writer) * message_layout.NUM_WORDS

    def answers(self, writer: int, reader: int) -> int:
        """Returns the index of the first word of what a reader answers a writer."""
        return ((self.num_ranks + writer) * self.num_ranks + reader) * message_layout.NUM_WORDS

    def ring(self, writer: int, reader: int) -> int:
        """Returns where in the region a ring begins."""
        first = _words_bytes(self.num_ranks)
        return first + (writer * self.num_ranks + reader) * self.sizes.ring_bytes

    def map_arena(self, writer: int, reader: int) -> ArenaWindow:
        """Maps an arena: the words of parts that were freed, those of slots, then the parts, see `PARTS`."""
        offset = writer * RANGE_BYTES + _region_bytes(self.num_ranks, self.sizes) + reader * _ROOM_OF_ARENA
        window = self._segment.map(offset, _ROOM_OF_ARENA)
        return ArenaWindow(window, memoryview(window.memory).cast("Q"))

    @property
    def is_full(self) -> bool:
        """Whether something that is to be written has no room."""
        return self.num_waiting > 0

    def wake(self, rank: int) -> None:
        """Wakes a rank if it sleeps; to be called after news were written for it."""
        fence()
        sleep = self.words[self._asleep_words + rank * message_layout.NUM_WORDS]
        if sleep & 1 and sleep != self._rung[rank]:
            self._ring(rank, sleep)

    def answer(self, writer: int) -> None:
        """Wakes a rank that waits for answers and sleeps; to be called after an answer was written for it."""
        fence()
        if self.words[self.news(writer, self.number) + message_layout.WAITING]:
            self.wake(writer)

    def _ring(self, rank: int, sleep: int) -> None:
        with self._ringing:  # the number of a doorbell that is closed may be another file's a moment later
            if self._doorbells:
                self._rung[rank] = sleep
                os.eventfd_write(self._doorbells[rank], 1)

    # What a poller watches

    def has_news(self) -> bool:
        """Says whether a peer has written news since `look`, or an answer that is waited for."""
        memory = self.region.memory
        return memory[self._news] != self._seen_news or (
            self.num_waiting > 0 and memory[self._answers] != self._seen_answers
        )

    def look(self) -> bool:
        """Takes what is written now for seen, before the lines take it in; returns what `has_news` would have."""
        memory = self.region.memory
        news, answers = memory[self._news], memory[self._answers]
        has_news = news != self._seen_news or (self.num_waiting > 0 and answers != self._seen_answers)
        self._seen_news, self._seen_answers = news, answers
        return has_news

    def look_again(self) -> None:
        """Takes back `look`: not all was taken in."""
        self._seen_news = b""

    def fall_asleep(self) -> bool:
        """Says to the peers that this rank sleeps; returns whether it may, because there is no news."""
        self.words[self._own_asleep] = (self.words[self._own_asleep] + 1) | 1
        fence()
        return not self.has_news()

    def wake_up(self) -> None:
        """Takes back `fall_asleep`."""
        self.words[self._own_asleep] = (self.words[self._own_asleep] | 1) + 1

    def close(self) -> None:
        """Closes the doorbells."""
        with self._ringing:
            doorbells, self._doorbells = self._doorbells, ()
            for fd in doorbells:
                os.close(fd)


def fence() -> None:
    """Has every word that this thread has stored be seen by all before it loads another: a locked instruction does
    that.

    The lock is a new one each time, so a thread that is interrupted here, by the end of a tensor even, cannot block.
    """
    threading.Lock().acquire()


def _words_bytes(num_ranks: int) -> int:
    size = num_ranks * (2 * num_ranks + 1) * message_layout.WORDS_BYTES
    return -(-size // 4096) * 4096


def _region_bytes(num_ranks: int, sizes: message_layout.Sizes) -> int:
    return _words_bytes(num_ranks) + num_ranks * num_ranks * sizes.ring_bytes
