"""Waits for messages between two ranks, and says where the other one is when it takes long."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import TypeVar

from echelon.backends.base import Backend
from echelon.backends.status import Question
from echelon.backends.work import Work
from echelon.collectives.watch import ANSWER_SECONDS, WARN_SECONDS, silence
from echelon.errors import PeerFailed, Timeout

T = TypeVar("T")

logger = logging.getLogger("echelon")


def wait_for(backend: Backend, work: Work[T], peers: Collection[int], context: int, timeout: float) -> T:
    """Waits for a message from or to one of `peers`, and warns every minute.

    Args:
        backend: of the message.
        work: the message.
        peers: the backend's ranks that are waited for.
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
    warns_at = begun + WARN_SECONDS if backend.doubts_after < math.inf else math.inf
    while True:
        try:
            return work.wait(max(0.0, min(deadline, warns_at) - backend.now()))
        except Timeout as error:
            now = backend.now()
            where = _where(backend, peers, context, min(timeout, ANSWER_SECONDS))
            text = f"rank {backend.rank} in {work.flight or work.description}: waited {now - begun:.1f} s for {where}"
            if now >= deadline:
                raise Timeout(text) from error
            logger.warning(text)
            warns_at = now + WARN_SECONDS
        except PeerFailed as error:
            if error.operation:
                raise
            raise error.noticed_by(f"rank {backend.rank} in {work.flight or work.description}") from error


def _where(backend: Backend, peers: Collection[int], context: int, seconds: float) -> str:
    statuses = backend.ask(peers, Question(context, 0, 0), seconds)
    known = [f"rank {peer}, which is {statuses[peer].text}" for peer in peers if peer in statuses]
    silent = [f"rank {peer}, which {silence(backend, peer, seconds)}" for peer in peers if peer not in statuses]
    return " and ".join((known + silent)[:4])
