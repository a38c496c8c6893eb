"""Counters and notes by which the ranks of a group synchronise in shared memory.

Strategy. A rank writes only into its own region. It announces an operation by writing note and words there, then its
tick. Every step of the operation is another tick. x86-64 keeps the order of stores and that of loads, so a rank that
sees a tick sees all data written before it. An announcement stands until the operation after the next, when every peer
has left this one. A note that equals the one of two operations ago need not be written again.

A rank that gives up an operation withdraws its announcement before it tells anybody. A peer that finds it withdrawn
waits to learn the cause. One thread at a time uses a sync block.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from echelon.backends.formats import memory_layout
from echelon.backends.formats.wire import as_sent
from echelon.backends.shared.memory import waiting
from echelon.backends.shared.memory.segment import Window
from echelon.backends.shared.memory.waiting import SpinThenSleep
from echelon.errors import CollectiveMismatch
from echelon.operation_records import OperationRecord

LookAround = Callable[["SyncBlock", int, Callable[[], bool], OperationRecord], None]
"""Callback of a waiting rank, at least every 50 ms: takes the sync block, the awaited rank of the group, a function
that returns whether it has come, and the operation. Raises to end the wait."""

_LOW_BITS = 0xFFFFFFFF
# Mark of a withdrawn announcement. Operations are numbered from 1, so no mark of theirs is 0.
_WITHDRAWN = 0


class _Peer(NamedTuple):
    """Positions of one rank's announcement, for every other operation."""

    rank: int
    tick: int
    """Index of its tick among the words."""
    mark: int
    """Index of the word that identifies its operation. The operation's numbers follow."""
    note: int
    """Offset of its note."""
    result_word: int
    """Index of the word with the mark of the operation whose result it has published."""
    result: int
    """Offset of that result."""


class SyncBlock:
    """Synchronisation of one group, as seen by one rank."""

    def __init__(
        self, region: Window, ranks: Sequence[int], rank: int, waiter: SpinThenSleep, check_liveness: LookAround
    ) -> None:
        """Reads nothing yet.

        Args:
            region: of the group, with a rank region for each rank.
            ranks: the number by which errors call each rank of the group.
            rank: of this process in the group.
            waiter: adaptive wait of this rank.
            check_liveness: called while this rank waits, see `LookAround`.
        """
        self.rank = rank
        self._names = ranks
        self._memory = region.memory
        self._words = memoryview(region.memory).cast("Q")
        self._address = region.address
        self._waiter = waiter
        self._look_around = check_liveness
        self._fence = threading.Lock()
        # Positions are computed once: the paths of small operations are indexing alone.
        self._rooms = [[_peer(peer, number) for peer in range(len(ranks))] for number in (0, 1)]
        self._others = [[room for room in rooms if room.rank != rank] for rooms in self._rooms]
        self._asleep = [_index(peer, memory_layout.ASLEEP) for peer in range(len(ranks))]
        self._peers_asleep = [word for peer, word in enumerate(self._asleep) if peer != rank]
        self._own = self._rooms[0][rank]
        # Own ticks are kept in Python as well: nobody else writes the word.
        self._ticks = self._words[self._own.tick]
        self._announced = self._ticks
        self._texts = [b"", b""]
        self._number = 0
        self._text = b""
        self._mark = 0

    def meet(self, call: OperationRecord, words: Sequence[int] = ()) -> None:
        """Announces an operation with all data written so far, then blocks until all peers have announced it.

        Args:
            call: the operation.
            words: up to 14 numbers for the peers, which read them by `word`.

        Raises:
            CollectiveMismatch: a peer has announced another one.
        """
        self._number = number = call.sequence & 1
        room = self._rooms[number][self.rank]
        self._text = text = _encoded(call.operation)
        # Identity, not equality: `_encoded` returns the same object for the same note while it is cached.
        if text is not self._texts[number]:
            self._memory[room.note : room.note + len(text)] = text
            self._texts[number] = text
        # The mark holds the number and the signature of all calls so far, so one comparison of words detects most
        # disagreements.
        self._mark = mark = (call.sequence & _LOW_BITS) << 32 | call.signature
        words_of_all, memory = self._words, self._memory
        words_of_all[room.mark] = mark
        if words:
            for index, word in enumerate(words, room.mark + 1):
                words_of_all[index] = word
        self._announced = self._ticks
        self.tick()
        level = self._announced + 1
        for peer in self._others[number]:
            # Fast path: a peer that came earlier costs a comparison and no call.
            if words_of_all[peer.tick] < level:
                self._wait(peer, level, call)
            # Read after the tick, so mark and note are those of the announcement.
            if words_of_all[peer.mark] != mark or memory[peer.note : peer.note + len(text)] != text:
                raise self._disagreement(peer, call)

    def withdraw(self, call: OperationRecord) -> None:
        """Withdraws the announcement of an operation that this rank gives up."""
        self._words[self._rooms[call.sequence & 1][self.rank].mark] = _WITHDRAWN

    def tick(self) -> None:
        """Publishes everything written so far, and wakes the peers that sleep."""
        self._ticks += 1
        words = self._words
        words[self._own.tick] = self._ticks
        # Memory order: a locked instruction, so the tick is visible before `asleep` is read. x86-64 lets a load pass an
        # earlier store, and a sleeper would be missed.
        self._fence.acquire()
        self._fence.release()
        for asleep in self._peers_asleep:
            if words[asleep]:
                # One system call wakes all that sleep on this rank's tick, whichever peer's flag was seen.
                waiting.wake(self._address + self._own.tick * memory_layout.WORD_BYTES)
                return

    def wait_for_all(self, count: int, call: OperationRecord) -> None:
        """Blocks until all peers have made `count` ticks of this operation after their announcement."""
        level = self._announced + 1 + count
        words = self._words
        for peer in self._others[0]:
            if words[peer.tick] < level:
                self._wait(peer, level, call)

    def word(self, rank: int, index: int) -> int:
        """Returns a number that a rank has announced. Valid between `meet` and the next operation."""
        return int(self._words[self._rooms[self._number][rank].mark + 1 + index])

    def result(self) -> int | None:
        """Returns the address of a result that a peer has published. None if there is none yet. Only after `meet`."""
        words, mark = self._words, self._mark
        for peer in self._others[self._number]:
            if words[peer.result_word] == mark:
                return self._address + peer.result
        return None

    def give_result(self, address: int, num_bytes: int) -> None:
        """Publishes a result of at most RESULT_BYTES to the peers. Call it after `meet`."""
        room = self._rooms[self._number][self.rank]
        ctypes.memmove(self._address + room.result, address, num_bytes)
        # Memory order: the result first, then the mark that announces it.
        self._words[room.result_word] = self._mark

    def disagreement(self) -> CollectiveMismatch | None:
        """Returns the mismatch with a peer that has announced another operation. None if there is none so far."""
        for peer in self._others[self._number]:
            if self._words[peer.tick] > self._announced:
                mark = self._words[peer.mark]  # read once: a peer that gives up may withdraw it at any time
                if mark != _WITHDRAWN and not self._agrees(peer, mark):
                    return self._mismatch(peer, mark)
        return None

    def missing(self) -> list[int]:
        """Returns the ranks, as errors call them, that have not announced this rank's current operation."""
        return [self._names[peer.rank] for peer in self._others[self._number] if not self._has_come(peer)]

    def _has_come(self, peer: _Peer) -> bool:
        return self._words[peer.tick] > self._announced and self._words[peer.mark] != _WITHDRAWN

    def _agrees(self, peer: _Peer, mark: int) -> bool:
        return mark == self._mark and self._memory[peer.note : peer.note + len(self._text)] == self._text

    def _wait(self, peer: _Peer, level: int, call: OperationRecord) -> None:
        self._wait_for_word(peer, peer.tick, level, call)

    def _wait_for_word(self, peer: _Peer, index: int, level: int, call: OperationRecord) -> None:
        self._waiter.wait(
            self._words,
            index,
            level,
            self._address + index * memory_layout.WORD_BYTES,
            self._asleep[self.rank],
            lambda: self._look_around(self, peer.rank, lambda: self._words[index] >= level, call),
        )

    def _disagreement(self, peer: _Peer, call: OperationRecord) -> CollectiveMismatch:
        """Returns the mismatch with a peer. If that has withdrawn, blocks until the cause is known and raises it."""
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
    """Returns a note as its bytes in memory. The same object for the same note while it is cached."""
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
    """Returns the index of the word at an offset in a rank's region."""
    return (rank * memory_layout.ROOM_BYTES + place) // memory_layout.WORD_BYTES
