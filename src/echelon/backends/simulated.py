"""Ranks in one process: each is a thread of the caller's, messages are copies in memory.

Strategy. Every rank has a mailbox under a lock of its own. A send takes the receiver's lock, copies the tensor in and
wakes the receiver; it never waits, and no thread ever holds two locks. The threads run freely, as the interpreter
schedules them. This is also the smallest example of a backend of one's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from echelon.arguments import check_world_size
from echelon.backends.base import Backend
from echelon.backends.control import ControlPlane
from echelon.backends.delivery import ANY, Receive
from echelon.backends.formats.wire import Tag, as_sent
from echelon.backends.matching import Mailbox
from echelon.backends.messages import Messages
from echelon.backends.modes import normal_mode
from echelon.backends.operators import Combine
from echelon.backends.status import Question, Status, status_of
from echelon.backends.work import DEFAULT_TIMEOUT, Received, Work
from echelon.errors import Failure, PeerFailed, Timeout


class SimulatedBackend(Backend):
    """One of several ranks in this process; `create_group` makes them."""

    @classmethod
    def create_group(cls, world_size: int, *, timeout: float = DEFAULT_TIMEOUT) -> list[SimulatedBackend]:
        """Makes all ranks of one world, to be used by one thread each.

        Raises:
            InvalidWorldSize: `world_size` is below 1 or above 65,536.
        """
        check_world_size(world_size)
        controls: list[SimulatedControl] = []
        controls.extend(SimulatedControl(rank, world_size, controls) for rank in range(world_size))
        return [cls(SimulatedMessages(control, timeout), control) for control in controls]

    @property
    def name(self) -> str:  # noqa: D102
        return "simulated"


class SimulatedControl(ControlPlane):
    """Control plane of one rank: it changes the mailboxes of the others."""

    def __init__(self, rank: int, world_size: int, world: list[SimulatedControl]) -> None:
        super().__init__(rank, world_size)
        self.world = world
        self.mailbox = Mailbox()
        self.changed = threading.Condition()
        self.is_closed = False

    def close(self, timeout: float) -> None:  # noqa: ARG002, D102
        self._leave(self.close_reason())

    def abort(self, reason: str, origin: int | None = None) -> None:  # noqa: D102
        failure = PeerFailed(self.rank if origin is None else origin, reason)
        self._leave(failure.told_by(self.rank))

    def revoke(self, context: int, ranks: Iterable[int], failure: Failure) -> Failure:  # noqa: D102
        with self.changed:
            first = self.mailbox.fail_context(context, failure)
            self.changed.notify_all()
        told = first.told_by(self.rank)
        for rank in set(ranks) - {self.rank}:
            self.world[rank].hear(lambda mailbox: mailbox.fail_context(context, told))
        return first

    def ask(  # noqa: D102
        self,
        ranks: Iterable[int],
        question: Question,
        timeout: float,  # noqa: ARG002
        until: Work[Any] | None = None,  # noqa: ARG002
    ) -> dict[int, Status]:
        peers = [self.world[rank] for rank in ranks if rank != self.rank]
        return {peer.rank: status_of(peer.recorder, question) for peer in peers if not peer.is_closed}

    def hear(self, tell: Callable[[Mailbox], object]) -> None:
        """Changes the mailbox; called by another rank's thread too."""
        with self.changed:
            tell(self.mailbox)
            self.changed.notify_all()

    def _leave(self, failure: PeerFailed) -> None:
        with self.changed:
            if self.is_closed:
                return
            self.is_closed = True
            self.mailbox.fail_all(self.closed_error())
            self.changed.notify_all()
        for peer in self.world:
            if peer is not self:
                peer.hear(lambda mailbox: mailbox.fail_peer(self.rank, failure))


class SimulatedMessages(Messages):
    """Sends and receives of one rank."""

    def __init__(self, control: SimulatedControl, timeout: float) -> None:
        super().__init__(control.rank, control.world_size, timeout)
        self._control = control

    def isend(self, tensor: torch.Tensor, dst: int, tag: int | Tag = 0, *, note: str = "") -> Work[None]:  # noqa: D102
        self.check_send(tensor, dst)
        tag = Tag.of(tag)
        if self._control.is_closed:
            raise self._control.closed_error()
        work: Work[None] = Work(self, f"send to rank {dst}, {tag}", self.timeout)
        error = self._control.mailbox.failures.of(dst, tag)
        if error is None:
            with normal_mode():
                copy = tensor.detach().clone()
                self._control.world[dst].hear(lambda mailbox: mailbox.take(self.rank, tag, copy, as_sent(note)))
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
        self.check_receive((src,), out)
        tag = Tag.of(tag)
        work: Work[torch.Tensor] = Work(self, f"receive from rank {src}, {tag}", self.timeout)
        self._post(Receive(work, src, tag, out, note, must_fit=must_fit, combine=combine))
        return work

    def irecv_any(self, sources: Mapping[int, int], tag: int | Tag = 0, *, note: str | None = "") -> Work[Received]:  # noqa: D102
        self.check_receive(sources)
        tag = Tag.of(tag)
        work: Work[Received] = Work(self, f"receive from any rank, {tag}", self.timeout)
        self._post(Receive(work, ANY, tag, None, note, sources))
        return work

    def cancel(self, work: Work[Any]) -> None:  # noqa: D102
        with self._control.changed:
            self._control.mailbox.withdraw(work, Timeout(f"{work.description}: withdrawn after its timeout"))

    def drive(self, work: Work[object], timeout: float | None) -> bool:
        """Sleeps until another rank's thread has completed `work`; returns False when the time is up."""
        seconds = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)  # more raises OverflowError
        with self._control.changed:
            return self._control.changed.wait_for(work.is_completed, seconds)

    def _post(self, receive: Receive) -> None:
        with self._control.changed:
            if self._control.is_closed:
                raise self._control.closed_error()
            self._control.mailbox.post(receive)
