"""Deadlocks of ranks that wait for each other's messages, found while they wait.

Strategy. A program that has waited for a second asks the awaited rank for which message its program waits, asks that
one in turn, and so on. Its own rank at the end of this chain means a cycle. Messages may be on their way, so each rank
must have got as many messages as the one that it waits for has sent to it. Ranks answer one after the other, and so
the whole chain is asked twice: equal waits and counts mean that all waited at once, with nothing on its way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import count
from threading import get_ident, main_thread
from typing import Any

from echelon.backends.base import Backend
from echelon.backends.status import ANSWER_SECONDS, Standing, Status, wait_behind
from echelon.backends.work import Work
from echelon.call_site import with_line
from echelon.errors import DeadlockError
from echelon.operation_records import MessageWait

_NAMED = 4
"""Number of ranks whose receives an error describes."""
_LONGEST_INTERVAL = 60.0
"""Most seconds between two looks."""
_numbers = count(1)


def ends_within(backend: Backend, work: Work[Any], src: int, seconds: float) -> bool:
    """Blocks until a message from the backend's rank `src` has come. False if `seconds` pass first.

    Raises:
        DeadlockError: this rank and others wait for each other's messages, and none of them can go on.
    """
    first = backend.query_peers_after
    # While another thread waits, the main one may go on.
    if seconds <= first or first == math.inf or get_ident() != main_thread().ident:
        return work.ends_within(seconds)
    deadline = backend.now() + seconds
    if work.ends_within(first):
        return True
    recorder = backend.flight_recorder
    text = operation_of(work)
    outer = recorder.message_wait  # of a handler of a signal, which waits inside of this wait
    recorder.message_wait = MessageWait(next(_numbers), get_ident(), src, work, text)
    try:
        interval = first
        while (left := deadline - backend.now()) > 0:
            # The last rank that has begun to wait finds the cycle at once, so the others may ask ever more seldom.
            if (waits := chain(backend, src, work)) and _is_at_rest(backend, src, waits):
                raise _deadlock(backend.rank, text, waits)
            if work.ends_within(min(interval, left)):
                return True
            interval = min(2 * interval, _LONGEST_INTERVAL)
        return work.has_ended
    finally:
        recorder.message_wait = outer


def operation_of(work: Work[Any]) -> str:
    """Returns the message that the calling thread waits for, with the user's line, for an error."""
    return with_line(work.description) if work.flight is None else str(work.flight)


def chain(backend: Backend, first: int, until: Work[Any] | None = None) -> dict[int, Status]:
    """Returns ranks whose programs wait for a message of the next one, the last one for a message of this rank.

    Args:
        backend: backend of this rank.
        first: rank at the beginning.
        until: ends the questions.

    Returns:
        The status of each rank, in order. Empty if there is no such chain, or a message is on its way.
    """
    found = _chain(backend, first, until)
    return found if found and _details(_chain(backend, first, until)) == _details(found) else {}


def described(waits: Mapping[int, Status]) -> str:
    """Returns the receives of some ranks, for an error."""
    texts = [f"rank {rank} in {status.text}" for rank, status in waits.items()]
    return "; ".join(texts if len(texts) <= _NAMED else [*texts[:_NAMED], f"{len(texts) - _NAMED} more"])


def _chain(backend: Backend, first: int, until: Work[Any] | None) -> dict[int, Status]:
    found: dict[int, Status] = {}
    rank, receiver, expected = first, backend.rank, None
    while rank != backend.rank:
        status = backend.control.ask([rank], wait_behind(receiver), ANSWER_SECONDS, until).get(rank)
        if status is None or status.standing != Standing.WAITING:
            return {}
        awaited, num_come, num_sent, _ = status.details
        # A cycle without this rank is found by its members.
        if rank in found or (expected is not None and num_sent != expected):
            return {}
        found[rank] = status
        rank, receiver, expected = awaited, rank, num_come
    return found if backend.control.num_sent(receiver) == expected else {}


def _details(waits: Mapping[int, Status]) -> dict[int, tuple[int, ...]]:
    return {rank: status.details for rank, status in waits.items()}


def _is_at_rest(backend: Backend, src: int, waits: Mapping[int, Status]) -> bool:
    """Whether this rank still waits, and no message of `src` is on its way."""
    own = backend.control.message_wait(src)
    return own is not None and own.details[1] == waits[src].details[2]


def _deadlock(rank: int, text: str, waits: Mapping[int, Status]) -> DeadlockError:
    path = " -> ".join(f"rank {each}" for each in (rank, *waits, rank))
    return DeadlockError(
        f"they wait for each other's messages, {path}: rank {rank} in {text}; {described(waits)}: let one of them send "
        "before it receives",
        (rank, *waits),
    )
