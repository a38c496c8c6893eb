"""Questions to other ranks that are on their way, and the answers that have come."""

from __future__ import annotations

from collections.abc import Iterable

from echelon.backends.status import Question, Status
from echelon.backends.work import Work


class Inquiry:
    """One question to several ranks. Its Work is completed when nobody is left who could answer."""

    def __init__(self, question: Question, ranks: Iterable[int], work: Work[None]) -> None:
        self.question = question
        self.answers: dict[int, Status] = {}
        self.work = work
        self.awaited = frozenset(ranks)
        self._look()

    def take(self, rank: int, status: Status) -> None:
        """Takes an answer in."""
        self.answers[rank] = status
        self.drop(rank)

    def drop(self, rank: int) -> None:
        """Says that a rank will not answer any more."""
        self.awaited -= {rank}
        self._look()

    def _look(self) -> None:
        if not self.awaited:
            self.work.complete()
