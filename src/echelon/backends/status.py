"""Status of other ranks, relative to one collective: in it, before it, past it, or in another one."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from echelon.operation_records import FlightRecorder, OperationRecord

ANSWER_SECONDS = 2.0
"""Time for a rank to answer a question."""


class Question(NamedTuple):
    """Question to other ranks about one collective of the asking rank."""

    context: int
    sequence: int
    signature: int
    """Equal on both ranks if they have made the same calls up to this one."""


def wait_behind(rank: int) -> Question:
    """Returns the question for the message that a rank's program waits for, if its messages go to `rank`."""
    # No group has the context 0.
    return Question(0, rank + 1, 0)


class Standing(IntEnum):
    """Position of a rank relative to a collective of another rank."""

    BEFORE = 0
    """It has not called the collective yet."""
    SAME = 1
    """It is in the same collective."""
    PAST = 2
    """It has finished the collective."""
    DIVERGED = 3
    """Its calls up to this one are others."""
    ELSEWHERE = 4
    """It has not called the collective yet, and is in a collective of another group."""
    BLOCKED = 5
    """It cannot call the collective yet: its program waits for a rank, in a collective of another group."""
    WAITING = 6
    """Its program waits for a message of another rank, and does nothing else."""


class Status(NamedTuple):
    """Answer of a rank to a Question."""

    standing: Standing
    text: str
    """The call that it made instead of this collective, else its current activity; with the user's line."""
    details: tuple[int, ...] = ()
    """Four numbers. If it is BLOCKED: context and number of the collective in which it is, the rank that it waits for,
    and the messages sent to the rank of the question; 0 for the question about a collective. If it is WAITING: the
    awaited rank, the messages from there, the messages sent to the rank of the question, and its wait."""


def status_of(recorder: FlightRecorder, question: Question) -> Status:
    """Answers a question from a rank's flight recorder.

    Args:
        recorder: record of the rank that answers.
        question: the question.
    """
    flight = recorder.find(question.context, question.sequence)
    if flight is not None and flight.signature != question.signature:
        return Status(Standing.DIVERGED, flight.with_marks())
    latest = recorder.latest(question.context)
    if latest is None or latest.sequence < question.sequence:
        others = [each for each in recorder.under_way() if each.sequence and each.context != question.context]
        if (blocked := blocked_in(others)) is not None:
            return blocked
        standing = Standing.ELSEWHERE if others else Standing.BEFORE
    elif flight is not None and (flight.ended is None or flight.error):
        standing = Standing.SAME
    else:
        standing = Standing.PAST
    return Status(standing, recorder.activity())


def blocked_in(flights: Iterable[OperationRecord], num_sent: int = 0) -> Status | None:
    """Returns the status of a rank whose program waits in one of some collectives. None if it may go on.

    Args:
        flights: records of the collectives.
        num_sent: messages sent to the rank of the question.
    """
    for each in flights:
        if each.watch is not None and (awaited := each.watch.blocks_for()) is not None:
            return Status(Standing.BLOCKED, f"in {each}", (each.context, each.sequence, awaited, num_sent))
    return None
