"""Counters and notes by which the ranks of a group synchronise in shared memory.

Strategy. The native library announces operations and waits (`native/board.c`). It returns after each sleep, and this
rank looks around before it goes on: for deaths, disagreements, the deadline. All errors and their texts are made here.

A rank that gives up an operation withdraws its announcement before it tells anybody. A peer that finds it withdrawn
waits to learn the cause. One thread at a time uses a sync block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from echelon._native import OPS, Board, Code, core
from echelon.backends.delivery import disagreement
from echelon.backends.formats import memory_layout
from echelon.backends.formats.wire import as_sent
from echelon.backends.operators import OP_NUMBERS, Operator
from echelon.backends.shared.memory.segment import Window, words_of
from echelon.backends.shared.memory.waiting import SpinThenSleep
from echelon.errors import CollectiveMismatch
from echelon.operation_records import OperationRecord

LookAround = Callable[["SyncBlock", int, Callable[[], bool], OperationRecord], None]
"""Callback of a waiting rank, at least every 50 ms: takes the sync block, the awaited rank of the group, a function
that returns whether it has come, and the operation. Raises to end the wait."""

_LOW_BITS = 0xFFFFFFFF
# Mark of a withdrawn announcement. Operations are numbered from 1, so no mark of theirs is 0.
_WITHDRAWN = 0


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
        self._words = words_of(region)
        # Keeps the memory at waiter.address, which the native library reads and writes.
        self._waiter = waiter
        self._look_around = check_liveness
        self._peers = [peer for peer in range(len(ranks)) if peer != rank]
        self._state = state = Board(
            region=region.address,
            rank_bytes=memory_layout.ROOM_BYTES,
            tick=memory_layout.TICK,
            asleep=memory_layout.ASLEEP,
            rank=rank,
            num_ranks=len(ranks),
            waiter=waiter.address,
            result_bytes=memory_layout.RESULT_BYTES if waiter.is_oversubscribed else 0,
            ticks=self._words[_index(rank, memory_layout.TICK)],
        )
        for number in (0, 1):
            state.mark[number] = memory_layout.words_at(number)
            state.result_mark[number] = memory_layout.result_word_at(number)
            state.note[number] = memory_layout.note_at(number)
            state.result[number] = memory_layout.result_at(number)
            state.small[number] = memory_layout.small_at(number)
        self.address = self._at = ctypes.addressof(state)
        """Of its state in this process, for the native library."""
        # The library compares notes by address: kept until the next note of the same copy takes its place.
        self._texts = [b"", b""]
        self._text = b""
        self._number = 0

    def meet(self, call: OperationRecord, words: Sequence[int] = ()) -> None:
        """Announces an operation with all data written so far, then blocks until all peers have announced it.

        Args:
            call: the operation.
            words: up to 14 numbers for the peers, which read them by `word`.

        Raises:
            CollectiveMismatch: a peer has announced another one.
        """
        if code := core.meet(self._at, self._mark(call), self._text, *words):
            self._finish(code, call)

    def all_reduce(self, call: OperationRecord, op: int, num_bytes: int, tensor: torch.Tensor) -> bool:
        """Reduces a small tensor over all ranks, in place, in one meeting. False if nothing was done.

        Args:
            call: the operation.
            op: index of the reduction among those of the library.
            num_bytes: of the tensor, at most SMALL_BYTES.
            tensor: of this rank.

        Raises:
            CollectiveMismatch: a peer has announced another operation.
        """
        code = core.all_reduce(self._at, self._mark(call), self._text, op, num_bytes, tensor)
        return not code or self._finish(code, call) != Code.NOT_SO

    def reduce(
        self, call: OperationRecord, op: int, num_shown: int, tensor: torch.Tensor, begin: int, out: torch.Tensor | None
    ) -> bool:
        """Reduces a part of a small tensor over all ranks, in one meeting; otherwise as `all_reduce`.

        Args:
            call: the operation.
            op: index of the reduction among those of the library.
            num_shown: bytes of the tensor that other ranks read, from its first one on.
            tensor: of this rank.
            begin: offset of the part, in bytes.
            out: overwritten with the reduced part, which is as long; None: this rank reduces nothing.
        """
        code = core.reduce(self._at, self._mark(call), self._text, op, num_shown, tensor, begin, out)
        return not code or self._finish(code, call) != Code.NOT_SO

    def exchange(self, call: OperationRecord, plan: bytes, own: int, target: int, words: Sequence[int] = ()) -> bool:
        """Exchanges small blocks as before. False if all have met and a rank has other blocks: nothing was read.

        Args:
            call: the operation.
            plan: see `exchange.Plan`.
            own: address of this rank's blocks.
            target: address of the result.
            words: as in `meet`.
        """
        code = core.exchange(self._at, self._mark(call), self._text, plan, own, target, *words)
        return not code or self._finish(code, call) != Code.CHANGED

    def broadcast(self, call: OperationRecord, source: int, num_bytes: int, tensor: torch.Tensor) -> bool:
        """Overwrites a small tensor with rank `source`'s; otherwise as `all_reduce`."""
        code = core.broadcast(self._at, self._mark(call), self._text, source, num_bytes, tensor)
        return not code or self._finish(code, call) != Code.NOT_SO

    def play(
        self,
        call: OperationRecord,
        program: bytes,
        own: torch.Tensor | None,
        target: torch.Tensor | None,
        operator: Operator | None,
    ) -> int:
        """Plays a program after `meet`, see `streaming.play`. Returns DONE, or TO_COMBINE before step `step`."""
        op = len(OPS) if operator is None else OP_NUMBERS.get(operator.name, len(OPS))
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (own, target)]
        return self._finish(core.play(self._at, program, op, own, *addresses), call)

    @property
    def step(self) -> int:
        """Number of the step before which the library has stopped."""
        return self._state.step

    def play_on(self, call: OperationRecord) -> int:
        """Goes on behind that step, which the caller has done. Returns as `play`."""
        self._state.step += 1
        return self._finish(core.go_on(self._at), call)

    def withdraw(self, call: OperationRecord) -> None:
        """Withdraws the announcement of an operation that this rank gives up."""
        self._words[_index(self.rank, memory_layout.words_at(call.sequence))] = _WITHDRAWN

    def tick(self) -> None:
        """Publishes everything written so far, and wakes the peers that sleep."""
        core.tick(self._at)

    def wait_for_all(self, count: int, call: OperationRecord) -> None:
        """Blocks until all peers have made `count` ticks of this operation after their announcement."""
        if code := core.wait_for_all(self._at, count):
            self._finish(code, call)

    def word(self, rank: int, index: int) -> int:
        """Returns a number that a rank has announced. Valid between `meet` and the next operation."""
        return self._words[_index(rank, memory_layout.words_at(self._number)) + 1 + index]

    def _mark(self, call: OperationRecord) -> int:
        """Returns the word that identifies an operation, which becomes the current one."""
        self._number = number = call.sequence & 1
        # Identity, not equality: `encoded` returns the same object for the same note while it is cached.
        self._text = self._texts[number] = encoded(call.operation)
        # Number, and signature of all calls so far: one comparison of words detects most disagreements.
        return (call.sequence & _LOW_BITS) << 32 | call.signature

    def _finish(self, code: int, call: OperationRecord) -> int:
        """Looks around until the library has done an operation. Returns its code. Raises the error that ends it."""
        state, words = self._state, self._words
        while code in (Code.WAITING, Code.DIFFERS):
            peer = state.peer
            if code == Code.DIFFERS:
                raise self._disagreement(peer, call)
            tick, level = _index(peer, memory_layout.TICK), state.level
            self._look_around(self, peer, lambda tick=tick, level=level: words[tick] >= level, call)  # type: ignore[misc]
            code = core.go_on(self._at)
        return code

    def forget_notes(self) -> None:
        """Has the next operations write their notes anew: the library compares addresses of texts, and some may end."""
        self._state.written[0] = self._state.written[1] = 0

    def disagreement(self) -> CollectiveMismatch | None:
        """Returns the mismatch with a peer that has announced another operation. None if there is none so far."""
        for peer in self._peers:
            if self._words[_index(peer, memory_layout.TICK)] > self._state.announced:
                mark = self._words[self._mark_at(peer)]  # read once: a peer that gives up may withdraw it at any time
                if mark != _WITHDRAWN and not self._agrees(peer, mark):
                    return self._mismatch(peer, mark)
        return None

    def missing(self) -> list[int]:
        """Returns the ranks, as errors call them, that have not announced this rank's current operation."""
        return [self._names[peer] for peer in self._peers if not self._has_come(peer)]

    def _has_come(self, peer: int) -> bool:
        has_ticked = self._words[_index(peer, memory_layout.TICK)] > self._state.announced
        return has_ticked and self._words[self._mark_at(peer)] != _WITHDRAWN

    def _mark_at(self, peer: int) -> int:
        """Returns the index of the word with which a peer identifies its operation."""
        return _index(peer, memory_layout.words_at(self._number))

    def _note_at(self, peer: int) -> int:
        """Returns the offset of a peer's note."""
        return peer * memory_layout.ROOM_BYTES + memory_layout.note_at(self._number)

    def _agrees(self, peer: int, mark: int) -> bool:
        note = self._note_at(peer)
        return mark == self._state.mark_now and self._memory[note : note + len(self._text)] == self._text

    def _disagreement(self, peer: int, call: OperationRecord) -> CollectiveMismatch:
        """Returns the mismatch with a peer. If that has withdrawn, blocks until the cause is known and raises it."""
        index, words = self._mark_at(peer), self._words
        while (mark := words[index]) == _WITHDRAWN:
            if core.wait_for_mark(self._at):
                self._look_around(self, peer, lambda: words[index] != _WITHDRAWN, call)
        return self._mismatch(peer, mark)

    def _mismatch(self, peer: int, mark: int) -> CollectiveMismatch:
        at = self._note_at(peer)
        note = self._memory[at : at + memory_layout.NOTE_ROOM].partition(b"\0")[0].decode(errors="replace")
        theirs = f"{note or 'an operation without a note'}, #{mark >> 32}"
        own = f"{self._text[:-1].decode()}, #{self._state.mark_now >> 32}"
        return disagreement(self._names[peer], theirs, own)


@lru_cache(1024)
def encoded(note: str) -> bytes:
    """Returns a note as its bytes in memory. The same object for the same note while it is cached."""
    return as_sent(note).encode() + b"\0"


def _index(rank: int, place: int) -> int:
    """Returns the index of the word at an offset in a rank's region."""
    return (rank * memory_layout.ROOM_BYTES + place) // memory_layout.WORD_BYTES
