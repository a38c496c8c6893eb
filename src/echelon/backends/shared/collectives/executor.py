"""The collectives of one group of ranks that share memory, as one rank does them.

Strategy. Operations pass one at a time, in the order in which they were called, blocking ones in the caller's thread
and others in the group's lane: all use the same words and slots. Each begins with an announcement that all ranks
compare, which is the only synchronisation of a small one: every rank writes its data beside its announcement, and reads
that of all. Large ones go through slots, piece by piece, in the order that `protocol.pipeline` says.

While a rank waits it looks around every 20 to 50 ms: for the death of a peer, for a peer that gave up the group, for
its own time being up. The first operation of a group maps the group's region, which its first rank gives out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, TypeVarTuple

import torch

from echelon.backends.lanes import InOrder
from echelon.backends.native import Allocate, AllocateAny, Call, Gathered, NativeCollectives
from echelon.backends.operators import Operator
from echelon.backends.shared.collectives import moving, reducing
from echelon.backends.shared.collectives.rank_region import RankRegions, Shared
from echelon.backends.shared.collectives.symmetric import SymmetricMemory
from echelon.backends.shared.collectives.sync_block import SyncBlock
from echelon.backends.shared.memory.segment import Segment, Window
from echelon.backends.shared.memory.waiting import SpinThenSleep
from echelon.errors import PeerFailed

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Host(Protocol):
    """What a group needs of the backend."""

    @property
    def segment(self) -> Segment:
        """What the ranks of this host share."""
        ...

    @property
    def waiter(self) -> SpinThenSleep:
        """How this rank waits."""
        ...

    def check(self, context: int) -> None:
        """Raises why the group cannot begin an operation."""
        ...

    def check_liveness(self, call: Call, context: int, rank: int | None, board: SyncBlock | None) -> None:
        """Raises why this rank need not wait longer, for a rank of the world, or (None) for its own turn."""
        ...

    def now(self) -> float:
        """Returns the time, in seconds."""
        ...

    def map_region(self, call: Call, context: int, ranks: tuple[int, ...]) -> Window:
        """Returns the region of a group; called once, by its first operation."""
        ...


class SharedCollectives(NativeCollectives):
    """The collectives of one group."""

    def __init__(self, host: Host, context: int, ranks: tuple[int, ...], rank: int) -> None:
        """Maps nothing yet.

        Args:
            host: see there.
            context: of the group.
            ranks: the world's rank of each member.
            rank: this one, among the members.
        """
        self._host = host
        self._context = context
        self._ranks = ranks
        self._rank = rank
        self._turnstile = InOrder()
        self._shared: Shared | None = None
        self._interrupted: int | None = None

    def all_reduce(self, call: Call, tensor: torch.Tensor, operator: Operator) -> None:  # noqa: D102
        self._pass(call, reducing.all_reduce, tensor, operator)

    def reduce(self, call: Call, tensor: torch.Tensor, dst: int, operator: Operator) -> None:  # noqa: D102
        self._pass(call, reducing.reduce, tensor, dst, operator)

    def reduce_scatter(  # noqa: D102
        self, call: Call, tensor: torch.Tensor, operator: Operator, place: Allocate
    ) -> torch.Tensor:
        return self._pass(call, reducing.reduce_scatter, tensor, operator, place)

    def broadcast(self, call: Call, tensor: torch.Tensor, src: int) -> None:  # noqa: D102
        self._pass(call, moving.broadcast, tensor, src)

    def all_gather(self, call: Call, rows: torch.Tensor, place: Allocate) -> torch.Tensor:  # noqa: D102
        return self._pass(call, moving.all_gather, rows, place)

    def gather(  # noqa: D102
        self, call: Call, rows: torch.Tensor, dst: int, place: Allocate
    ) -> torch.Tensor | None:
        return self._pass(call, moving.gather, rows, dst, place)

    def scatter(  # noqa: D102
        self, call: Call, tensor: torch.Tensor | None, src: int, place: AllocateAny
    ) -> torch.Tensor:
        return self._pass(call, moving.scatter, tensor, src, place)

    def all_to_all(  # noqa: D102
        self, call: Call, rows: torch.Tensor, splits: Sequence[int] | None, place: Allocate
    ) -> Gathered:
        return self._pass(call, moving.all_to_all, rows, splits, place)

    def barrier(self, call: Call) -> None:  # noqa: D102
        self._pass(call, moving.barrier)

    def empty(self, call: Call, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:  # noqa: D102
        return self._pass(call, _allocate, shape, dtype)

    def _pass(self, call: Call, act: Callable[[Shared, Call, *Ts], T], *arguments: *Ts) -> T:
        """Does an operation when it is its turn."""
        number = call.sequence
        if not self._turnstile.is_open_to(number):
            self._turnstile.enter(number, lambda: self._host.check_liveness(call, self._context, None, None))
        try:
            self._host.check(self._context)
            if self._interrupted is not None:
                raise PeerFailed(self._ranks[self._rank], f"its operation #{self._interrupted} was interrupted")
            return act(self._shared or self._open(call), call, *arguments)
        except BaseException:
            self._interrupted = self._interrupted or number
            if self._shared is not None:
                self._shared.board.withdraw(call)
            raise
        finally:
            self._turnstile.leave(number)

    def _open(self, call: Call) -> Shared:
        host, context, ranks = self._host, self._context, self._ranks
        region = host.map_region(call, context, ranks)

        def check_liveness(board: SyncBlock, rank: int, has_come: Callable[[], bool], call: Call) -> None:
            """Refers neither to the board nor to this object, so the region goes with the group, without a cycle."""
            host.check_liveness(call, context, ranks[rank], board)
            if host.now() >= call.lookout.next_check_at:
                call.lookout.look(ranks[rank], has_come)

        count = len(ranks)
        board = SyncBlock(region, ranks, self._rank, host.waiter, check_liveness)
        symmetric = SymmetricMemory(host.segment, self._rank, count)
        self._shared = Shared(
            self._rank, count, host.waiter.is_oversubscribed, board, RankRegions(region, count, self._rank), symmetric
        )
        return self._shared


def _allocate(shared: Shared, call: Call, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return shared.symmetric.allocate(shared.board, call, shape, dtype)
