"""Looks into a collective that takes long: do the others make the same calls, and where are they?

Strategy. A rank that waits asks the rank that it waits for, after a second and then ever more seldom. If that one has
called something else as this operation, or has finished it, what is waited for will never come. When the time is up,
all ranks are asked, so that the error names the one that is behind, not one that itself waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from echelon.backends.base import Backend
from echelon.backends.status import Question, Standing, Status
from echelon.errors import CollectiveMismatch, PeerFailed, Timeout
from echelon.operation_records import OperationRecord
from echelon.wording import listed

logger = logging.getLogger("echelon")

ANSWER_SECONDS = 2.0
"""How long a rank has to answer."""
WARN_SECONDS = 60.0
"""A wait that takes this long is worth a warning, and another one every time that it has taken as long again."""
_NAMED = 4
"""How many ranks that are behind are described; of the others there is only the number."""
_ADVICE = "every rank must call the same operations in the same order with the same arguments"


class HangDiagnosis:
    """Watches over one collective of this rank."""

    __slots__ = ("_backend", "_begun", "_flight", "_ranks", "next_check_at")

    def __init__(self, backend: Backend, ranks: Sequence[int], flight: OperationRecord, begun: float) -> None:
        """Describes what to watch over.

        Args:
            backend: what the ranks are asked over.
            ranks: the backend's rank of each member of the group.
            flight: the collective.
            begun: when it began to run, in the backend's time.
        """
        self._backend = backend
        self._ranks = ranks
        self._flight = flight
        self._begun = begun
        self.next_check_at = begun + backend.query_peers_after
        """When to look next, in the backend's time."""

    def look(self, peer: int, has_come: Callable[[], bool]) -> None:
        """Asks the rank of the backend that is waited for whether it makes the same calls.

        Args:
            peer: the rank.
            has_come: says whether what is waited for has come meanwhile.

        Raises:
            CollectiveMismatch: it does not.
        """
        waited = self._backend.now() - self._begun
        self.next_check_at = self._begun + (2 * waited if 2 * waited <= WARN_SECONDS else _whole_minutes(waited) + 60)
        if waited >= WARN_SECONDS:
            logger.warning("rank %d in %s: %s", self._backend.rank, self._flight, self.timeout())
        status = self._ask([peer]).get(peer)
        if status is None or has_come():
            return
        if status.standing == Standing.DIVERGED:
            raise self.disagreement(peer)
        if status.standing == Standing.PAST:
            raise CollectiveMismatch(
                f"{self._mine()}, which waits for rank {peer}, {status.text}, which has finished it without sending "
                f"what is waited for: choose the same algorithm on every rank, and {_ADVICE}"
            )

    def disagreement(self, peer: int, theirs: str = "", detail: str = "") -> CollectiveMismatch:
        """Makes the error for a rank that does not make the same calls, with the first difference of the two.

        Args:
            peer: the backend's rank of it.
            theirs: its operation, as its message says; empty: not known.
            detail: what its message was refused for.
        """
        flight: OperationRecord | None = self._flight
        mine, differs = self._mine(), False
        while flight is not None:
            status = self._ask([peer], flight).get(peer)
            if status is None or status.standing != Standing.DIVERGED:
                break
            mine, theirs, differs = f"{flight.with_marks()} on rank {self._backend.rank}", status.text, True
            flight = self._backend.flight_recorder.find(flight.context, flight.sequence - 1)
        if detail and not differs:
            return CollectiveMismatch(f"{mine}: {detail}")
        return CollectiveMismatch(f"{mine}, but {theirs} on rank {peer}: {_ADVICE}")

    def mismatch(self) -> CollectiveMismatch | None:
        """Asks all ranks; returns the error if one has called something else as this operation."""
        return self._mismatch(self._ask(self._ranks))

    def departure(self, failure: PeerFailed) -> CollectiveMismatch:
        """Makes the error for a rank that has closed its group, which is to make fewer calls."""
        return CollectiveMismatch(
            f"{self._mine()}, but rank {failure.rank}: {failure.reason}: {_ADVICE}", departed=failure.rank
        )

    def timeout(self, seconds: float = ANSWER_SECONDS) -> Timeout:
        """Returns an error that says how long this rank has waited, for whom, and where all are.

        Args:
            seconds: for the ranks to answer.

        Raises:
            CollectiveMismatch: a rank makes other calls.
        """
        waited = self._backend.now() - self._begun
        statuses = self._ask(self._ranks, seconds=seconds)
        if mismatch := self._mismatch(statuses):
            raise mismatch
        others = [rank for rank in self._ranks if rank != self._backend.rank]
        behind = [rank for rank in others if rank in statuses and statuses[rank].standing == Standing.BEFORE]
        silent = [rank for rank in others if rank not in statuses]
        there = [rank for rank in others if rank in statuses and rank not in behind]
        culprits = [f"rank {rank}, which is {statuses[rank].text}" for rank in behind]
        culprits += [f"rank {rank}, which {silence(self._backend, rank, seconds)}" for rank in silent]
        if len(culprits) > _NAMED:
            culprits[_NAMED:] = [f"{len(culprits) - _NAMED} more"]
        if not culprits:
            details = "; ".join(f"rank {rank} is {statuses[rank].text}" for rank in there[:_NAMED])
            return Timeout(f"waited {waited:.1f} s, though all ranks have called it: {details}")
        rest = f"; {listed(there)} {'has' if len(there) == 1 else 'have'} called it" if there else ""
        text = f"waited {waited:.1f} s for {'; and for '.join(culprits)}{rest}"
        return Timeout(text, tuple(sorted([*behind, *silent])))

    def _ask(
        self, ranks: Sequence[int], flight: OperationRecord | None = None, seconds: float = ANSWER_SECONDS
    ) -> Mapping[int, Status]:
        flight = flight or self._flight
        others = [rank for rank in ranks if rank != self._backend.rank]
        question = Question(flight.context, flight.sequence, flight.signature)
        return self._backend.ask(others, question, seconds)

    def _mismatch(self, statuses: Mapping[int, Status]) -> CollectiveMismatch | None:
        others = [rank for rank, status in statuses.items() if status.standing == Standing.DIVERGED]
        return self.disagreement(others[0]) if others else None

    def _mine(self) -> str:
        return f"{self._flight} on rank {self._backend.rank}"


def silence(backend: Backend, rank: int, seconds: float) -> str:
    """Says of a rank that it has not answered, and what is known of it."""
    heard = backend.last_heard(rank)
    last = f"; its last message was of {heard}" if heard else ""
    return f"has not answered for {seconds:g} s: computing without a pause, or stopped{last}"


def _whole_minutes(seconds: float) -> float:
    return seconds // WARN_SECONDS * WARN_SECONDS
