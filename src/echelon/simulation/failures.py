"""Failures of simulated ranks, of which the first cause is raised."""

from __future__ import annotations

from typing import NamedTuple

from echelon.errors import PeerFailed
from echelon.launch.report import RankFailure, describe, first_cause


class FirstFailure(NamedTuple):
    """First cause among the failures of all ranks."""

    rank: int
    where: str
    """Place in the program, after a comma. Empty if it is not known."""
    error: BaseException


class Failures:
    """Failures of ranks so far, in the order in which they happened."""

    def __init__(self) -> None:
        self._failures: list[RankFailure] = []
        self._errors: dict[int, BaseException] = {}

    def add(self, rank: int, error: BaseException) -> None:
        """Adds the error of a rank."""
        self._errors[rank] = error
        self._failures.append(describe(rank, error))

    def first(self) -> FirstFailure | None:
        """Returns the first cause. None if no rank has failed."""
        if not self._failures:
            return None
        cause = first_cause(self._failures)
        error = self._errors[cause.rank]
        if isinstance(error, SystemExit):  # raised here, it would silently end the program that simulates
            error = PeerFailed(cause.rank, f"it {cause.summary}")
            error.__cause__ = self._errors[cause.rank]
        return FirstFailure(cause.rank, cause.where and f", at {cause.where}", error)

    def forget(self) -> None:
        """Drops the errors, whose tracebacks refer to frames of the ranks."""
        self._errors.clear()
