"""Ranks in one process: each is a thread of the caller's, messages are copies in memory.

Strategy. Every rank has a mailbox under a lock of its own. A send takes the receiver's lock, copies the tensor in and
wakes the receiver; it never waits, and no thread ever holds two locks. The threads run freely, as the interpreter
schedules them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch

from echelon.arguments import check_world_size
from echelon.backends.base import Backend
from echelon.backends.delivery import ANY, Receive
from echelon.backends.formats.wire import Tag, as_sent
from echelon.backends.lanes import Lanes
from echelon.backends.matching import Mailbox
from echelon.backends.modes import normal_mode
from echelon.backends.operators import Combine
from echelon.backends.status import Question, Status, status_of
from echelon.backends.work import DEFAULT_TIMEOUT, Received, Work
from echelon.errors import Failure, PeerFailed, Timeout

T = TypeVar("T")


class SimulatedBackend(Backend):
    """One of several ranks in this process; `create_group` makes them."""

    def __init__(self, rank: int, world: list[SimulatedBackend], world_size: int, timeout: float) -> None:
        super().__init__(rank, world_size, timeout)
        self._world = world
        self._mailbox = Mailbox()
        self._changed = threading.Condition()
        self._closed = False
        self._lanes = Lanes(f"simulated rank {rank}", timeout)

    @classmethod
    def create_group(cls, world_size: int, *, timeout: float = DEFAULT_TIMEOUT) -> list[SimulatedBackend]:
        """Makes all ranks of one world, to be used by one thread each.

        Raises:
            InvalidWorldSize: `world_size` is below 1 or above 65,536.
        """
        check_world_size(world_size)
        world: list[SimulatedBackend] = []
        world.extend(cls(rank, world, world_size, timeout) for rank in range(world_size))
        return world

    @property
    def name(self) -> str:  # noqa: D102
        return "simulated"

    def isend(self, tensor: torch.Tensor, dst: int, tag: int | Tag = 0, *, note: str = "") -> Work[None]:  # noqa: D102
        tag = self.checked_send(tensor, dst, tag)
        if self._closed:
            raise self.closed_error()
        work: Work[None] = Work(self, f"send to rank {dst}, {tag}", self.timeout)
        error = self._mailbox.failure(dst, tag)
        if error is None:
            self._world[dst]._deliver(self.rank, tag, tensor.detach(), note)
        work.complete(error=error)
        return work

    def irecv(  # noqa: D102
        self,
        src: int,
        tag: int | Tag = 0,
        *,
        out: torch.Tensor | None = None,
        note: str | None = "",
        must_fit: bool = True,
        combine: Combine | None = None,
    ) -> Work[torch.Tensor]:
        tag = self.checked_receive(src, tag, out)
        work: Work[torch.Tensor] = Work(self, f"receive from rank {src}, {tag}", self.timeout)
        self._post(Receive(work, src, tag, out, note, must_fit=must_fit, combine=combine))
        return work

    def irecv_any(  # noqa: D102
        self, sources: Mapping[int, int], tag: int | Tag = 0, *, note: str | None = ""
    ) -> Work[Received]:
        tag = self.checked_receive_any(sources, tag)
        work: Work[Received] = Work(self, f"receive from any rank, {tag}", self.timeout)
        self._post(Receive(work, ANY, tag, None, note, sources))
        return work

    def _post(self, receive: Receive) -> None:
        with self._changed:
            if self._closed:
                raise self.closed_error()
            self._mailbox.post(receive)

    def cancel(self, work: Work[torch.Tensor] | Work[Received]) -> None:  # noqa: D102
        with self._changed:
            self._mailbox.withdraw(work, Timeout(f"{work.description}: withdrawn after its timeout"))

    def start(self, function: Callable[[], T], description: str, lane: int = 0) -> Work[T]:  # noqa: D102
        if self._closed:
            raise self.closed_error()
        return self._lanes.start(function, description, lane)

    def drive(self, work: Work[object], timeout: float | None) -> bool:
        """Sleeps until another rank's thread has completed `work`; returns False when the time is up."""
        seconds = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)  # more raises OverflowError
        with self._changed:
            return self._changed.wait_for(work.is_completed, seconds)

    def ask(self, ranks: Iterable[int], question: Question, timeout: float) -> dict[int, Status]:  # noqa: ARG002, D102
        peers = [self._world[rank] for rank in ranks if rank != self.rank]
        return {peer.rank: status_of(peer.flight_recorder, question) for peer in peers if not peer._closed}

    def revoke(self, context: int, ranks: Iterable[int], failure: Failure) -> Failure:  # noqa: D102
        with self._changed:
            first = self._mailbox.fail_context(context, failure)
            self._changed.notify_all()
        told = first.told_by(self.rank)
        for rank in set(ranks) - {self.rank}:
            self._world[rank]._hear(lambda mailbox: mailbox.fail_context(context, told))
        return first

    def abort(self, reason: str, origin: int | None = None) -> None:  # noqa: D102
        failure = PeerFailed(self.rank if origin is None else origin, reason)
        self._leave(failure.told_by(self.rank))

    def close(self, timeout: float | None = None) -> None:  # noqa: D102
        self._leave(self.close_reason(), timeout)

    def _leave(self, failure: PeerFailed, timeout: float | None = 0.5) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._mailbox.fail_all(self.closed_error())
            self._changed.notify_all()
        for peer in self._world:
            if peer is not self:
                peer._hear(lambda mailbox: mailbox.fail_peer(self.rank, failure))
        self._lanes.close(self.timeout if timeout is None else timeout)

    def _deliver(self, src: int, tag: Tag, tensor: torch.Tensor, note: str) -> None:
        """Takes a message in; called by the sender's thread."""
        with self._changed, normal_mode():
            self._mailbox.take(src, tag, tensor.clone(), as_sent(note))
            self._changed.notify_all()

    def _hear(self, tell: Callable[[Mailbox], object]) -> None:
        """Takes bad news in; called by another rank's thread."""
        with self._changed:
            tell(self._mailbox)
            self._changed.notify_all()
