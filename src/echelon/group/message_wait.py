"""Waits for messages between two ranks, and says where the other one is when it takes long."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import Any, TypeVar

from echelon.backends.base import Backend
from echelon.backends.status import Question
from echelon.backends.work import Work
from echelon.collectives.calls.hang_diagnosis import ANSWER_SECONDS, WARN_SECONDS, silence
from echelon.errors import PeerFailed, Timeout

T = TypeVar("T")

_NAMED = 4
"""How many ranks an error describes."""

logger = logging.getLogger("echelon")


def wait_for(
    backend: Backend, work: Work[T], peers: Collection[int], members: Collection[int], context: int, timeout: float
) -> T:
    """Waits for a message from or to one of `peers`, and warns every minute.

    Args:
        backend: of the message.
        work: the message.
        peers: the backend's ranks that are waited for.
        members: the backend's ranks of the group.
        context: of the group.
        timeout: seconds; at most as long again goes into asking the peers where they are.

    Raises:
        Timeout: with where the peers are.
        PeerFailed: with the message in which it was noticed.
        EchelonError: the message failed.
    """
    if work.has_ended and work.exception() is None:
        return work.wait(0.0)  # not `result`: a simulation counts what was waited for
    begun = backend.now()
    deadline = begun + timeout
    warns_at = begun + WARN_SECONDS if backend.query_peers_after < math.inf else math.inf
    while True:
        try:
            if work.ends_within(max(0.0, min(deadline, warns_at) - backend.now())):
                return work.wait(0.0)
            now = backend.now()
            where = describe_peers(backend, peers, members, context, min(timeout, ANSWER_SECONDS))
            if work.has_ended:  # while the others were asked
                continue
            text = f"rank {backend.rank} in {work.flight or work.description}: waited {now - begun:.1f} s for {where}"
            if now >= deadline:
                raise Timeout(text, where.ranks)
            logger.warning(text)
            warns_at = now + WARN_SECONDS
        except PeerFailed as error:
            if error.operation:
                raise
            raise error.noticed_by(f"rank {backend.rank} in {work.flight or work.description}") from error


def receive(
    backend: Backend,
    work: Work[Any],
    peers: Collection[int],
    members: Collection[int],
    context: int,
    timeout: float,
) -> Any:
    """Waits as `wait_for` does, and withdraws the receive if the wait ends without it: the next one gets the message.

    A message that has come before it could be withdrawn is returned, however late it is: else it would be lost.
    """
    try:
        return wait_for(backend, work, peers, members, context, timeout)
    except Timeout:
        backend.cancel(work)
        if isinstance(work.exception(), Timeout):
            raise
        return wait_for(backend, work, peers, members, context, 0.0)
    except (Exception, KeyboardInterrupt):  # such as one that a handler of a signal raises
        backend.cancel(work)
        raise


class MessageLateness:
    """Knowledge about a message that does not come, or does not leave, in time."""

    __slots__ = ("_backend", "_context", "_members", "_peers")

    def __init__(self, backend: Backend, peers: Collection[int], members: Collection[int], context: int) -> None:
        """Describes the message.

        Args:
            backend: of the message.
            peers: the backend's ranks that are waited for.
            members: the backend's ranks of the group.
            context: of the group.
        """
        self._backend = backend
        self._peers = peers
        self._members = members
        self._context = context

    def patience(self) -> float:
        """Returns 0: a message has no time of its own."""
        return 0.0

    def describe_peers(self, seconds: float) -> Timeout:
        """Asks the group's ranks where they are."""
        return describe_peers(self._backend, self._peers, self._members, self._context, min(seconds, ANSWER_SECONDS))


def describe_peers(
    backend: Backend, peers: Collection[int], members: Collection[int], context: int, seconds: float
) -> Timeout:
    """Returns an error that says where the peers are, and which other members do not answer.

    A peer may itself wait for a rank that is stopped. So all members are asked, and the silent ones are the cause.
    """
    others = [rank for rank in members if rank != backend.rank and rank not in peers]
    statuses = backend.ask([*peers, *others], Question(context, 0, 0), seconds)
    known = [f"rank {peer}, which is {statuses[peer].text}" for peer in peers if peer in statuses]
    silent = [rank for rank in (*peers, *others) if rank not in statuses]
    late = [f"rank {peer}, which {silence(backend, peer, seconds)}" for peer in peers if peer in silent]
    text = " and ".join((known + late)[:_NAMED])
    for rank in [rank for rank in others if rank in silent][:_NAMED]:
        text += f"; rank {rank} {silence(backend, rank, seconds)}"
    return Timeout(text, tuple(silent))
