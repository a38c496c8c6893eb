"""The words by which the ranks of a group tell each other, in shared memory, how far they are.

Strategy. A rank writes only into its own room. It announces an operation by writing note and words there, and then its
tick; every step of the operation is another tick. Loads and stores keep their order on x86-64, so who sees a tick sees
all that was written before it. What is announced stands until the operation after the next, when every peer has left
this one. One thread at a time uses a board.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from echelon.backends.native import Call
from echelon.backends.shared import futex, layout
from echelon.backends.shared.segment import Window
from echelon.backends.shared.waiting import Waiter
from echelon.backends.wire import as_sent, readable
from echelon.errors import CollectiveMismatch

LookAround = Callable[[int, Callable[[], bool], Call], None]
"""Called at least every 20 ms while a rank waits: for which rank of the group, what says whether it has come, and in
which operation. Raises to end the wait."""


class _Peer(NamedTuple):
    rank: int
    tick: int
    """Index of its tick among the words."""
    asleep: int
    notes: tuple[int, int]
    """Where its notes begin."""
    words: tuple[int, int]
    """Indices of its words."""


class Board:
    """The board of one group on one rank."""

    def __init__(
        self, region: Window, ranks: Sequence[int], rank: int, waiter: Waiter, look_around: LookAround
    ) -> None:
        """Reads nothing yet.

        Args:
            region: the group's, a room for each rank.
            ranks: what errors call each rank of the group.
            rank: of this process in the group.
            waiter: how to wait.
            look_around: see there.
        """
        self.rank = rank
        self._names = ranks
        self._memory = region.memory
        self._words = memoryview(region.memory).cast("Q")
        self._address = region.address
        self._waiter = waiter
        self._look_around = look_around
        self._fence = threading.Lock()
        rooms = [_peer(number) for number in range(len(ranks))]
        self._own = rooms[rank]
        self._rooms = rooms
        self._peers = [room for room in rooms if room.rank != rank]
        self._ticks = self._words[self._own.tick]
        self._announced = self._ticks
        self._text = b""
        self._number = 0

    def announce(self, call: Call, words: Sequence[int] = ()) -> None:
        """Writes down what this rank is about to do; peers see it with the next tick.

        Args:
            call: the operation.
            words: at most 8 numbers for the peers, see `word`.
        """
        self._number = call.sequence & 1
        self._text = text = as_sent(call.note).encode() + b"\0"
        start = self._own.notes[self._number]
        self._memory[start : start + len(text)] = text
        if words:
            start = self._own.words[self._number]
            for index, word in enumerate(words, start):
                self._words[index] = word
        self._announced = self._ticks

    def tick(self) -> None:
        """Lets the peers see all that was written so far, and wakes those that sleep."""
        self._ticks += 1
        words = self._words
        words[self._own.tick] = self._ticks
        self._fence.acquire()  # a locked instruction: the tick is out before we look who sleeps
        self._fence.release()
        for peer in self._peers:
            if words[peer.asleep]:
                futex.wake(self._address + self._own.tick * layout.WORD_BYTES)
                return

    def meet(self, call: Call) -> None:
        """Ticks, and returns when all peers have announced the same.

        Raises:
            CollectiveMismatch: one has announced something else.
        """
        self.tick()
        level = self._announced + 1
        words, memory, text, number = self._words, self._memory, self._text, self._number
        for peer in self._peers:
            if words[peer.tick] < level:
                self._wait(peer, level, call)
            start = peer.notes[number]
            if memory[start : start + len(text)] != text:
                raise self._mismatch(peer)

    def wait_for_all(self, count: int, call: Call) -> None:
        """Returns when all peers have done `count` ticks of this operation after that of the announcement."""
        level = self._announced + 1 + count
        words = self._words
        for peer in self._peers:
            if words[peer.tick] < level:
                self._wait(peer, level, call)

    def word(self, rank: int, index: int) -> int:
        """Returns a word that a rank has announced; only between `meet` and the next operation."""
        return int(self._words[self._rooms[rank].words[self._number] + index])

    def disagreement(self) -> CollectiveMismatch | None:
        """Returns how a peer that has announced its operation already disagrees with this rank, if one does."""
        for peer in self._peers:
            if self._words[peer.tick] > self._announced:
                start = peer.notes[self._number]
                if self._memory[start : start + len(self._text)] != self._text:
                    return self._mismatch(peer)
        return None

    def missing(self) -> list[int]:
        """Returns the ranks, as errors call them, that have not announced the operation that this rank is in."""
        return [self._names[peer.rank] for peer in self._peers if self._words[peer.tick] <= self._announced]

    def _wait(self, peer: _Peer, level: int, call: Call) -> None:
        self._waiter.wait(
            self._words,
            peer.tick,
            level,
            self._address + peer.tick * layout.WORD_BYTES,
            self._own.asleep,
            lambda: self._look_around(peer.rank, lambda: self._words[peer.tick] >= level, call),
        )

    def _mismatch(self, peer: _Peer) -> CollectiveMismatch:
        start = peer.notes[self._number]
        note = self._memory[start : start + layout.NOTE_ROOM].partition(b"\0")[0].decode(errors="replace")
        theirs = readable(note) or "an operation without a note"
        return CollectiveMismatch(
            f"rank {self._names[peer.rank]} is in {theirs}, this rank in {readable(self._text[:-1].decode())}: "
            "every rank must call the same operations in the same order with the same arguments",
            self._names[peer.rank],
            theirs,
        )


def _peer(rank: int) -> _Peer:
    room = rank * layout.ROOM_BYTES

    def index(place: int) -> int:
        return (room + place) // layout.WORD_BYTES

    return _Peer(
        rank,
        index(layout.TICK),
        index(layout.ASLEEP),
        (room + layout.note_at(0), room + layout.note_at(1)),
        (index(layout.words_at(0)), index(layout.words_at(1))),
    )
