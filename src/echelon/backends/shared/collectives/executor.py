"""Collectives of one group of ranks that share memory, as one rank runs them.

Strategy. Operations run one at a time, in the order of their calls, as all use the same words and slots. Blocking ones
run in the caller's thread, others in the group's lane. Each begins with an announcement that all ranks compare. For a
small operation that is the only synchronisation: every rank writes its data beside its announcement and reads the data
of all. Large ones go through slots, piece by piece, in the order of `slot_order.pipeline`.

A waiting rank checks every 20 to 50 ms for the death of a peer, for a revoked group, and for its deadline. The first
operation of a group maps the group's region, which its first rank allocates. The last rank that drops the group returns
the region's memory to the system.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any, Protocol, TypeAlias

import torch

from echelon._native import Act, Target, core
from echelon.backends.collective import REDUCTIONS, Collective, CollectiveExecutor, Run
from echelon.backends.formats import memory_layout
from echelon.backends.lanes import CAUSE_SECONDS, InOrder, wait_for_news
from echelon.backends.operators import OP_NUMBERS
from echelon.backends.shared.collectives import moving, reducing
from echelon.backends.shared.collectives.exchange import Repeated
from echelon.backends.shared.collectives.native_calls import NativeCalls, Way
from echelon.backends.shared.collectives.rank_region import RankRegions, Shared
from echelon.backends.shared.collectives.symmetric import SymmetricMemory
from echelon.backends.shared.collectives.sync_block import SyncBlock
from echelon.backends.shared.memory.segment import Segment, Window, words_of
from echelon.backends.shared.memory.waiting import SpinThenSleep
from echelon.errors import DeadlockError, PeerFailed
from echelon.operation_records import OperationRecord


class Host(Protocol):
    """Services of the backend that a group uses."""

    @property
    def segment(self) -> Segment:
        """Memory file that the ranks of this host share."""
        ...

    @property
    def waiter(self) -> SpinThenSleep:
        """Adaptive wait of this rank."""
        ...

    def check_liveness(self, call: OperationRecord, context: int, rank: int | None, board: SyncBlock | None) -> None:
        """Raises if waiting for `rank` of the world is in vain. None: this rank waits for its own turn."""
        ...

    def now(self) -> float:
        """Returns the time, in seconds."""
        ...

    def map_region(self, call: OperationRecord, context: int, ranks: tuple[int, ...]) -> Window:
        """Maps the region of a group. Called once, by its first operation."""
        ...


class SharedMemoryExecutor(CollectiveExecutor):
    """Collectives of one group on one rank."""

    known: NativeCalls

    def __init__(
        self, host: Host, check_open: Callable[[int], None], context: int, ranks: tuple[int, ...], rank: int
    ) -> None:
        """Maps nothing yet.

        Args:
            host: the backend.
            check_open: raises if a context cannot begin an operation.
            context: of the group.
            ranks: the world's rank of each member.
            rank: this one, among the members.
        """
        self._host = host
        self._check_open = check_open
        self._context = context
        self._ranks = ranks
        self._rank = rank
        self.known = NativeCalls()
        self._turns = InOrder(self.known.numbers)
        # Set by the first operation, as mapping blocks for the offset from the group's first rank.
        self._shared: Shared | None = None
        # Thread that is in an operation. 0: none.
        self._thread = 0
        # Number of the operation in which this rank stopped half-way. Its ticks no longer match the peers', so no later
        # operation may run.
        self._interrupted: int | None = None

    def prepare(self, collective: Collective) -> Run:  # noqa: D102
        act = _ACTS[collective.kind](collective)
        run: Run = partial(self._run, act)
        if collective.kind == "all_to_all":
            run = collective.checked(run)
        if find_way := _find_way(collective, act, self._rank, len(self._ranks)):
            self.known.expect(run, find_way)
        return run

    def stop(self) -> None:
        """Has every later operation take the way that checks whether the backend is open."""
        self.known.numbers.is_stopped = 1
        self.known.forget_messages()

    def _run(self, act: _Act, call: OperationRecord, tensor: torch.Tensor | None, out: torch.Tensor | None) -> Any:
        """Runs an operation when its turn has come. Blocks for earlier ones of the group."""
        turns, number = self._turns, call.sequence
        # Fast path: mostly no operation is before this one, and its turn takes no lock.
        if turns.next != number:
            if self._thread == get_ident():  # in a signal's handler, on whose end the operation before depends
                raise DeadlockError(
                    f"it was called inside of operation #{turns.next} of its group, as by a signal's handler: set a "
                    "flag in the handler, and call it later",
                    (self._ranks[self._rank],),
                )
            turns.enter(number, lambda: self._host.check_liveness(call, self._context, None, None))
        try:
            self._check_open(self._context)
            if self._interrupted is not None:
                # The thread of that operation is about to tell all ranks its error, which is the first cause.
                look = partial(self._host.check_liveness, call, self._context, None, None)
                wait_for_news(CAUSE_SECONDS, self._host.now, look)
                raise PeerFailed(self._ranks[self._rank], f"its operation #{self._interrupted} was interrupted")
            self._thread = get_ident()
            return act(self._shared or self._open(call), call, tensor, out)
        except BaseException:
            # KeyboardInterrupt as well: however the operation ended, peers must not read its announcement as valid.
            self._interrupted = self._interrupted or number
            self.stop()
            if self._shared is not None:
                # Before the revocation over TCP: a peer that finds it withdrawn waits for the cause and reports no
                # mismatch.
                self._shared.board.withdraw(call)
            raise
        finally:
            self._thread = 0
            turns.leave(number)

    def _open(self, call: OperationRecord) -> Shared:
        host, context, ranks = self._host, self._context, self._ranks
        region = host.map_region(call, context, ranks)

        # Refers neither to the board nor to `self`, so no cycle keeps the region mapped after the group.
        def check_liveness(board: SyncBlock, rank: int, has_come: Callable[[], bool], call: OperationRecord) -> None:
            try:
                host.check_liveness(call, context, ranks[rank], board)
            except PeerFailed:
                # The peer may have ticked, finished and closed since the waiter read the word: that tick counts.
                if not has_come():
                    raise
                return
            # After the cheap checks: asking a rank for its progress is a message over TCP.
            if host.now() >= call.lookout.next_check_at:
                call.lookout.look(ranks[rank], has_come)

        count = len(ranks)
        weakref.finalize(self, _leave, region, self._rank, count, os.getpid()).atexit = False
        board = SyncBlock(region, ranks, self._rank, host.waiter, check_liveness)
        symmetric = SymmetricMemory(host.segment, self._rank, count)
        self.known.open(board)
        self._shared = Shared(
            self._rank,
            count,
            board,
            RankRegions(region, count, self._rank),
            symmetric,
            self.known,
        )
        return self._shared


def _leave(region: Window, rank: int, count: int, process: int) -> None:
    """Notes that a rank has no use for a region any more. Releases the region's memory after all ranks have left."""
    if os.getpid() != process:
        return  # a forked child dropped its private copy
    words = words_of(region)
    starts = range(0, count * memory_layout.ROOM_BYTES, memory_layout.ROOM_BYTES)
    notes = [(start + memory_layout.LEFT) // memory_layout.WORD_BYTES for start in starts]
    words[notes[rank]] = 1
    # The own note before the others are read: of the last two ranks, at least one sees all.
    core.fence()
    if all(words[note] for note in notes):
        with suppress(OSError):  # a system that cannot: the memory stays until the job ends
            region.memory.madvise(mmap.MADV_REMOVE)


_Act: TypeAlias = Callable[[Shared, OperationRecord, Any, torch.Tensor | None], Any]
"""This rank's part of an operation whose turn has come."""


def _all_reduce(collective: Collective) -> partial[Any]:
    is_small = collective.num_bytes <= memory_layout.SMALL_BYTES
    return partial(reducing.small_all_reduce if is_small else reducing.large_all_reduce, collective.reduction)


def _allocate(collective: Collective, shared: Shared, call: OperationRecord, *_: object) -> torch.Tensor:
    assert collective.shape is not None
    assert collective.dtype is not None
    # From now on exchanges announce where their tensors are.
    shared.known.forget()
    return shared.symmetric.allocate(shared.board, call, collective.shape, collective.dtype)


_ACTS: Mapping[str, Callable[[Collective], partial[Any]]] = {
    "all_reduce": _all_reduce,
    "reduce": lambda collective: partial(reducing.reduce, collective.root, collective.reduction),
    "reduce_scatter": lambda collective: partial(reducing.reduce_scatter, collective.reduction),
    "broadcast": lambda collective: partial(moving.broadcast, collective.root),
    "all_gather": lambda _: partial(moving.all_gather, Repeated()),
    "gather": lambda collective: partial(moving.gather, collective.root, Repeated()),
    "scatter": lambda collective: partial(moving.scatter, collective.root, Repeated()),
    "all_to_all": lambda collective: partial(moving.all_to_all, collective, Repeated()),
    # Only gathers exchange numbers of rows. All but the source have none.
    "broadcast_rows": lambda _: partial(moving.all_gather, Repeated()),
    "barrier": lambda _: partial(moving.barrier),
    "empty": lambda collective: partial(_allocate, collective),
}


def _find_way(collective: Collective, act: partial[Any], rank: int, count: int) -> Callable[[], Way | None] | None:
    """Returns a function that tells how the native library runs a small collective by itself. None if it never does."""
    if collective.kind in ("all_gather", "gather", "scatter", "all_to_all"):
        repeated: Repeated = act.args[-1]
        return lambda: repeated.way
    if collective.num_bytes > memory_layout.SMALL_BYTES:
        return None
    way = _way_of(collective, rank, count)
    return lambda: way


def _way_of(collective: Collective, rank: int, count: int) -> Way | None:
    """Returns how the native library runs a small barrier, broadcast or reduction. None if it does not."""
    kind, size = collective.kind, collective.num_bytes
    if kind == "barrier":
        return Way(Act.MEETS_ONLY)
    if kind == "broadcast":
        return Way(Act.RECEIVES, source=collective.root, changes_tensor=True)
    op = OP_NUMBERS.get(collective.reduction.name) if kind in REDUCTIONS else None
    if op is None:
        return None
    way = Way(Act.REDUCES, Target.IN_PLACE, op, size, changes_tensor=True)
    if kind == "all_reduce":
        return way._replace(is_published=True)
    if kind == "reduce_scatter":
        assert collective.shape is not None
        begin = reducing.begin_of(collective.shape, size, rank, count)
        return way._replace(target=Target.INTO_OUT, begin=begin, changes_tensor=False, makes_result=True)
    if rank == collective.root:
        return way._replace(num_shown=0)
    return way._replace(target=Target.NONE, changes_tensor=False)
