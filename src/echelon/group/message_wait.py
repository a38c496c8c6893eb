"""Waits for point-to-point messages, with a diagnosis of the peers if a wait takes long."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from echelon.backends.base import Backend
from echelon.backends.formats.wire import Tag
from echelon.backends.message_cycle import ends_within, operation_of
from echelon.backends.status import ANSWER_SECONDS, Question
from echelon.backends.work import Work
from echelon.call_site import shortened
from echelon.collectives.calls.hang_diagnosis import WARN_SECONDS, silence
from echelon.errors import PeerFailed, Timeout
from echelon.operation_records import OperationRecord

T = TypeVar("T")

# Number of ranks that an error describes.
_NAMED = 4

logger = logging.getLogger("echelon")


def wait_for(
    backend: Backend,
    work: Work[T],
    peers: Sequence[int],
    members: Collection[int],
    context: int,
    timeout: float,
    *,
    is_blocking: bool = False,
) -> T:
    """Blocks until a message from or to one of `peers` is done, and logs a warning every minute.

    Args:
        backend: Backend of the message.
        work: The message.
        peers: The backend's ranks that may complete the message.
        members: The backend's ranks of the group.
        context: Context of the group.
        timeout: Seconds. A query of the peers after them takes at most as long again.
        is_blocking: Whether the message is a receive, and the program has no other way on than its end.

    Raises:
        DeadlockError: it is one, and waits for ranks that wait for this one.
        Timeout: it says where the peers are.
        PeerFailed: it names the message that was waited for.
        EchelonError: the message failed.
    """
    if work.has_ended and work.exception() is None:
        return work.wait(0.0)  # not `result`: a simulation records the wait
    begun = backend.now()
    deadline = begun + timeout
    # A simulation has no intervals: it notices at once that no rank can go on. So it logs no warnings either.
    warns_at = begun + WARN_SECONDS if backend.query_peers_after < math.inf else math.inf
    while True:
        try:
            seconds = max(0.0, min(deadline, warns_at) - backend.now())
            blocks = is_blocking and len(peers) == 1
            if ends_within(backend, work, peers[0], seconds) if blocks else work.ends_within(seconds):
                return work.wait(0.0)
            now = backend.now()
            # At the deadline for the error, before it for the warning.
            where = describe_peers(backend, peers, members, context, min(timeout, ANSWER_SECONDS))
            if work.has_ended:  # while the others were asked
                continue
            text = f"rank {backend.rank} in {operation_of(work)}: waited {now - begun:.1f} s for {where}"
            if now >= deadline:
                raise Timeout(text, where.ranks)
            logger.warning("%s", shortened(text))
            warns_at = now + WARN_SECONDS
        except PeerFailed as error:
            if error.operation:
                raise
            raise error.noticed_by(f"rank {backend.rank} in {operation_of(work)}") from error


def receive(
    backend: Backend,
    work: Work[T],
    peers: Sequence[int],
    members: Collection[int],
    context: int,
    timeout: float,
    *,
    is_blocking: bool,
) -> T:
    """Waits as `wait_for` does, and withdraws the receive if the wait ends without it: the next one gets the message.

    A message that has come before it could be withdrawn is returned, however late it is: else it would be lost.
    """
    try:
        return wait_for(backend, work, peers, members, context, timeout, is_blocking=is_blocking)
    except Timeout:
        backend.messages.cancel(work)
        if isinstance(work.exception(), Timeout):
            raise
        return wait_for(backend, work, peers, members, context, 0.0)
    except (Exception, KeyboardInterrupt):  # such as one that a handler of a signal raises
        backend.messages.cancel(work)
        raise


def _is_of(tag: Tag, context: int) -> bool:
    """Whether a message is one that a program passes in a group."""
    return tag.context == context and tag.sequence == 0


@dataclass(slots=True)
class MessageLateness:
    """Diagnosis of a late message, sent or received.

    Args:
        backend: Backend of the message.
        peers: The backend's ranks that may complete the message.
        members: The backend's ranks of the group.
        context: Context of the group.
        is_receive: Whether it is received.
    """

    backend: Backend
    peers: Sequence[int]
    members: Collection[int]
    context: int
    is_receive: bool = False

    def ends_within(self, work: Work[Any], seconds: float) -> bool:
        """Blocks until the message is done; see `message_cycle.ends_within`."""
        if self.is_receive and len(self.peers) == 1:
            return ends_within(self.backend, work, self.peers[0], seconds)
        return work.ends_within(seconds)

    def patience(self) -> float:
        """Returns 0: a message has no timeout of its own."""
        return 0.0

    def is_of(self, flight: OperationRecord) -> bool:  # noqa: ARG002
        """Returns False: a message is no collective."""
        return False

    def describe_peers(self, seconds: float) -> Timeout:
        """Queries the group's ranks and returns an error that describes them. Blocks for at most 2 s."""
        return describe_peers(self.backend, self.peers, self.members, self.context, min(seconds, ANSWER_SECONDS))


def describe_peers(
    backend: Backend, peers: Collection[int], members: Collection[int], context: int, seconds: float
) -> Timeout:
    """Queries all members, and returns an error with the state of the peers and the members that do not answer.

    Blocks for at most `seconds`.
    """
    # Not only the peers: a peer may itself wait for a rank that is stopped. The silent ranks are the cause.
    others = [rank for rank in members if rank != backend.rank and rank not in peers]
    statuses = backend.control.ask([*peers, *others], Question(context, 0, 0), seconds)
    known = [f"rank {peer}, which is {statuses[peer].text}" for peer in peers if peer in statuses]
    silent = [rank for rank in (*peers, *others) if rank not in statuses]
    late = [f"rank {peer}, which {silence(backend, peer, seconds)}" for peer in peers if peer in silent]
    text = " and ".join((known + late)[:_NAMED])
    for rank in [rank for rank in others if rank in silent][:_NAMED]:
        text += f"; rank {rank} {silence(backend, rank, seconds)}"
    if separation := backend.control.separation([backend.rank, *peers]):
        text += f"; {separation}"
    messages = [(src, tag.step) for src, tag in backend.messages.unreceived() if _is_of(tag, context)]
    if messages:
        sources = " and ".join(f"from rank {src}, tag {tag}" for src, tag in messages[:_NAMED])
        text += f"; no receive takes a message {sources}: make both sides agree on rank and tag"
    return Timeout(text, tuple(silent))
