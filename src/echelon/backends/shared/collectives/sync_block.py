"""The words by which the ranks of a group tell each other, in shared memory, how far they are.

Strategy. A rank writes only into its own room. It announces an operation by writing note and words there, and then its
tick; every step of the operation is another tick. Loads and stores keep their order on x86-64, so who sees a tick sees
all that was written before it. What is announced stands until the operation after the next, when every peer has left
this one; so a note that is the same as two operations ago need not be written again. A rank that gives an operation up
withdraws its announcement before it tells anybody: a peer that finds it so waits until it is told why. One thread at a
time uses a board.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from echelon.backends.formats import memory_layout
from echelon.backends.formats.wire import as_sent
from echelon.backends.native import Call
from echelon.backends.shared.memory import waiting
from echelon.backends.shared.memory.segment import Window
from echelon.backends.shared.memory.waiting import SpinThenSleep
from echelon.errors import CollectiveMismatch

LookAround = Callable[["SyncBlock", int, Callable[[], bool], Call], None]
"""Called at least every 50 ms while a rank waits: at which board, for which rank of the group, what says whether it has
come, and in which operation. Raises to end the wait."""

_LOW_BITS = 0xFFFFFFFF
_WITHDRAWN = 0
"""What tells no operation from others: their numbers begin at 1."""


class _Peer(NamedTuple):
    """Where a rank's announcement of every other operation is."""

    rank: int
    tick: int
    """Index of its tick among the words."""
    mark: int
    """Index of the word that tells its operation from others; its numbers follow."""
    note: int
    """Where its note begins."""
    result_word: int
    """Index of the word that says of which operation it has given the result."""
    result: int
    """Where that begins."""


class SyncBlock:
    """The board of one group on one rank."""

    def __init__(
        self, region: Window, ranks: Sequence[int], rank: int, waiter: SpinThenSleep, check_liveness: LookAround
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
        self._look_around = check_liveness
        self._fence = threading.Lock()
        self._rooms = [[_peer(peer, number) for peer in range(len(ranks))] for number in (0, 1)]
        self._others = [[room for room in rooms if room.rank != rank] for rooms in self._rooms]
        self._asleep = [_index(peer, memory_layout.ASLEEP) for peer in range(len(ranks))]
        self._peers_asleep = [word for peer, word in enumerate(self._asleep) if peer != rank]
        self._own = self._rooms[0][rank]
        self._ticks = self._words[self._own.tick]
        self._announced = self._ticks
        self._texts = [b"", b""]
        self._number = 0
        self._text = b""
        self._mark = 0

    def announce(self, call: Call, words: Sequence[int] = ()) -> None:
        """Writes down what this rank is about to do; peers see it with the next tick.

        Args:
            call: the operation.
            words: a few numbers for the peers, see `word`.
        """
        self._number = number = call.sequence & 1
        room = self._rooms[number][self.rank]
        self._text = text = _encoded(call.operation)
        if text is not self._texts[number]:
            self._memory[room.note : room.note + len(text)] = text
            self._texts[number] = text
        self._mark = mark = (call.sequence & _LOW_BITS) << 32 | call.signature
        self._words[room.mark] = mark
        if words:
            for index, word in enumerate(words, room.mark + 1):
                self._words[index] = word
        self._announced = self._ticks

    def withdraw(self, call: Call) -> None:
        """Takes back what was announced for an operation that this rank gives up."""
        self._words[self._rooms[call.sequence & 1][self.rank].mark] = _WITHDRAWN

    def tick(self) -> None:
        """Lets the peers see all that was written so far, and wakes those that sleep."""
        self._ticks += 1
        words = self._words
        words[self._own.tick] = self._ticks
        self._fence.acquire()  # a locked instruction: the tick is out before we look who sleeps
        self._fence.release()
        for asleep in self._peers_asleep:
            if words[asleep]:
                waiting.wake(self._address + self._own.tick * memory_layout.WORD_BYTES)
                return

    def meet(self, call: Call) -> None:
        """Ticks, and returns when all peers have announced the same.

        Raises:
            CollectiveMismatch: one has announced something else.
        """
        self.tick()
        level = self._announced + 1
        words, memory, text, mark = self._words, self._memory, self._text, self._mark
        for peer in self._others[self._number]:
            if words[peer.tick] < level:
                self._wait(peer, level, call)
            if words[peer.mark] != mark or memory[peer.note : peer.note + len(text)] != text:
                raise self._disagreement(peer, call)

    def wait_for_all(self, count: int, call: Call) -> None:
        """Returns when all peers have done `count` ticks of this operation after that of the announcement."""
        level = self._announced + 1 + count
        words = self._words
        for peer in self._others[0]:
            if words[peer.tick] < level:
                self._wait(peer, level, call)

    def word(self, rank: int, index: int) -> int:
        """Returns a word that a rank has announced; only between `meet` and the next operation."""
        return int(self._words[self._rooms[self._number][rank].mark + 1 + index])

    def result(self) -> int | None:
        """Returns where in this process the result is that a peer has given, if one has; after `meet`."""
        words, mark = self._words, self._mark
        for peer in self._others[self._number]:
            if words[peer.result_word] == mark:
                return self._address + peer.result
        return None

    def give_result(self, address: int, num_bytes: int) -> None:
        """Shows the peers a result that this rank has combined, of at most RESULT_BYTES; after `meet`."""
        room = self._rooms[self._number][self.rank]
        ctypes.memmove(self._address + room.result, address, num_bytes)
        self._words[room.result_word] = self._mark

    def disagreement(self) -> CollectiveMismatch | None:
        """Returns how a peer that has announced its operation already disagrees with this rank, if one does."""
        for peer in self._others[self._number]:
            if self._words[peer.tick] > self._announced:
                mark = self._words[peer.mark]  # read once: a peer that gives up withdraws it at any time
                if mark != _WITHDRAWN and not self._agrees(peer, mark):
                    return self._mismatch(peer, mark)
        return None

    def missing(self) -> list[int]:
        """Returns the ranks, as errors call them, that have not announced the operation that this rank is in."""
        return [self._names[peer.rank] for peer in self._others[self._number] if not self._has_come(peer)]

    def _has_come(self, peer: _Peer) -> bool:
        return self._words[peer.tick] > self._announced and self._words[peer.mark] != _WITHDRAWN

    def _agrees(self, peer: _Peer, mark: int) -> bool:
        return mark == self._mark and self._memory[peer.note : peer.note + len(self._text)] == self._text

    def _wait(self, peer: _Peer, level: int, call: Call) -> None:
        self._wait_for_word(peer, peer.tick, level, call)

    def _wait_for_word(self, peer: _Peer, index: int, level: int, call: Call) -> None:
        self._waiter.wait(
            self._words,
            index,
            level,
            self._address + index * memory_layout.WORD_BYTES,
            self._asleep[self.rank],
            lambda: self._look_around(self, peer.rank, lambda: self._words[index] >= level, call),
        )

    def _disagreement(self, peer: _Peer, call: Call) -> CollectiveMismatch:
        """Returns how a peer disagrees. Of one that has given up this rank is told why: that is raised."""
        while (mark := self._words[peer.mark]) == _WITHDRAWN:
            self._wait_for_word(peer, peer.mark, _WITHDRAWN + 1, call)
        return self._mismatch(peer, mark)

    def _mismatch(self, peer: _Peer, mark: int) -> CollectiveMismatch:
        note = (
            self._memory[peer.note : peer.note + memory_layout.NOTE_ROOM].partition(b"\0")[0].decode(errors="replace")
        )
        theirs = f"{note or 'an operation without a note'}, #{mark >> 32}"
        return CollectiveMismatch(
            f"rank {self._names[peer.rank]} is in {theirs}, this rank in {self._text[:-1].decode()}, "
            f"#{self._mark >> 32}: every rank must call the same operations in the same order with the same arguments",
            self._names[peer.rank],
            theirs,
        )


@lru_cache(1024)
def _encoded(note: str) -> bytes:
    """Returns a note as it stands in the memory; of one note always the same object, as long as it is remembered."""
    return as_sent(note).encode() + b"\0"


def _peer(rank: int, number: int) -> _Peer:
    return _Peer(
        rank,
        _index(rank, memory_layout.TICK),
        _index(rank, memory_layout.words_at(number)),
        rank * memory_layout.ROOM_BYTES + memory_layout.note_at(number),
        _index(rank, memory_layout.result_word_at(number)),
        rank * memory_layout.ROOM_BYTES + memory_layout.result_at(number),
    )


def _index(rank: int, place: int) -> int:
    """Returns the index among the words of a place in a rank's room."""
    return (rank * memory_layout.ROOM_BYTES + place) // memory_layout.WORD_BYTES
