"""Asking other ranks where they are: in the same collective, before it, behind it, or in another one."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from echelon.operation_records import FlightRecorder


class Question(NamedTuple):
    """Where a rank is, seen from one collective of the rank that asks."""

    context: int
    sequence: int
    signature: int
    """Equal on both ranks if they have made the same calls up to this one."""


class Standing(IntEnum):
    """Where a rank is, seen from a collective of another one."""

    BEFORE = 0
    """It has not called the collective yet."""
    SAME = 1
    """It is in the same collective."""
    PAST = 2
    """It has finished the collective."""
    DIVERGED = 3
    """Its calls up to this one are others."""


class Status(NamedTuple):
    """What a rank answers."""

    standing: Standing
    text: str
    """What it called as this collective, if that is another one; else what it is doing now. With the user's line."""


def status_of(recorder: FlightRecorder, question: Question) -> Status:
    """Returns what the rank with this recorder answers."""
    flight = recorder.find(question.context, question.sequence)
    if flight is not None and flight.signature != question.signature:
        return Status(Standing.DIVERGED, flight.with_marks())
    latest = recorder.latest(question.context)
    if latest is None or latest.sequence < question.sequence:
        standing = Standing.BEFORE
    elif flight is not None and (flight.ended is None or flight.error):
        standing = Standing.SAME
    else:
        standing = Standing.PAST
    return Status(standing, recorder.activity())
