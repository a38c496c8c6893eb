"""Hang diagnosis of a collective: do all ranks make the same calls, and which rank is behind?

Strategy. A waiting rank queries the rank that it waits for, after a second and then at doubling intervals. If the peer
has called another operation in its place, or has finished it, the awaited message will never come. The same holds if
the peer's program waits in a collective of another group, or for a message. The rank for which it waits then waits in
turn, and so on, back to this rank. All wait in their main threads, and no other thread runs code of the program. A rank
that has not called a collective has sent nothing for it, so to ask one rank after the other is enough. At the timeout
all ranks are queried, so that the error names the rank that is behind, not a rank that itself waits for it.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import get_ident, main_thread

from echelon.backends.base import Backend
from echelon.backends.message_cycle import chain, described
from echelon.backends.status import ANSWER_SECONDS, Question, Standing, Status, wait_behind
from echelon.backends.work import is_waited_for
from echelon.call_site import may_run_in_other_threads, shortened
from echelon.errors import CollectiveMismatch, PeerFailed, Timeout
from echelon.operation_records import CALLED_FROM, FlightRecorder, OperationRecord
from echelon.purposes import SAME_ARGUMENTS, SAME_CALLS, cure_of
from echelon.wording import listed

logger = logging.getLogger("echelon")

WARN_SECONDS = 60.0
"""Interval of warnings during a wait. The first comes after this time."""
_SOON_SECONDS = 2.0
"""Interval of checks while the awaited rank is in a collective of another group."""
# Number of ranks that an error describes; of further ranks it gives only the number.
_NAMED = 4
_COMPARED = 200
"""Number of earlier calls whose lines are compared."""
_NOT_CALLED = (Standing.BEFORE, Standing.ELSEWHERE)
_BEHIND = (*_NOT_CALLED, Standing.BLOCKED)


class HangDiagnosis:
    """Watchdog of one collective on this rank."""

    __slots__ = ("_awaited", "_backend", "_begun", "_flight", "_is_called_here", "_ranks", "_warns_at", "next_check_at")

    def __init__(self, backend: Backend, ranks: Sequence[int], flight: OperationRecord, begun: float) -> None:
        """Starts to watch a collective.

        Args:
            backend: Backend that queries the ranks.
            ranks: The backend's rank of each member of the group.
            flight: Record of the collective.
            begun: Start of the collective, in the backend's time.
        """
        self._backend = backend
        self._ranks = ranks
        self._flight = flight
        self._begun = begun
        self._awaited = -1
        """Rank that this rank waited for when it looked last."""
        self._is_called_here = False
        """Whether the thread that called the collective runs it, as without async_op."""
        self._warns_at = begun + WARN_SECONDS
        self.next_check_at = begun + backend.query_peers_after
        """Time of the next check, in the backend's time."""

    def look(self, peer: int, has_come: Callable[[], bool]) -> None:
        """Queries the awaited rank about its calls, and sets the time of the next check. Warns after long waits.

        Args:
            peer: The backend's rank of the awaited rank.
            has_come: Returns whether the awaited message has come meanwhile.

        Raises:
            CollectiveMismatch: the rank makes other calls than this one, or waits for this rank in another group.
        """
        self._awaited, self._is_called_here = peer, get_ident() == self._flight.thread
        self._plan_next_check()
        status = self._ask([peer]).get(peer)
        # The message may have come while the query was in flight; then a peer that is past the operation is no error.
        if status is None or has_come():
            return
        if status.standing == Standing.DIVERGED:
            raise self.disagreement(peer)
        # It may find only at its own next check that it waits for this rank.
        if status.standing in (Standing.ELSEWHERE, Standing.BLOCKED):
            self.next_check_at = min(self.next_check_at, self._backend.now() + _SOON_SECONDS)
        if status.standing == Standing.BLOCKED and (circle := self._circle(status)):
            raise self._waits_in_circle(peer, status, circle)
        if status.standing in _NOT_CALLED and self.blocks_for() == peer and (waits := chain(self._backend, peer)):
            # Asked again: it may have called the collective before it began to wait.
            status = self._ask([peer]).get(peer)
            if status is not None and status.standing in _NOT_CALLED and not has_come():
                raise self._waits_for_message(peer, waits)
            return
        if status.standing in _BEHIND and (waits := self._mixed_circle()) and not has_come():
            links = ", ".join(_links(waits, self._backend.rank))
            advice = "put collectives and messages in one order that all ranks follow"
            raise CollectiveMismatch(f"{self._mine()} waits for rank {peer}, {links}: {advice}")
        if status.standing == Standing.PAST:
            raise CollectiveMismatch(
                f"{self._mine()}, which waits for rank {peer}, {status.text}, which has finished it without sending "
                f"the awaited message: choose the same algorithm on every rank, and {SAME_ARGUMENTS}"
            )

    def _plan_next_check(self) -> None:
        """Sets the time of the next check, and warns if it is time to."""
        # Intervals double up to a minute: a short wait is diagnosed early, and a long one costs few queries.
        waited = self._backend.now() - self._begun
        self.next_check_at = self._begun + (2 * waited if 2 * waited <= WARN_SECONDS else _whole_minutes(waited) + 60)
        # Apart from the checks, which are more frequent while the peer is in another group.
        if self._backend.now() >= self._warns_at:
            self._warns_at = self._begun + _whole_minutes(waited) + WARN_SECONDS
            logger.warning("%s", shortened(f"rank {self._backend.rank} in {self._flight}: {self.timeout()}"))

    def _waits_in_circle(self, peer: int, status: Status, circle: Sequence[str]) -> CollectiveMismatch:
        """Returns the error for ranks that wait for each other in collectives of several groups."""
        advice = "use the groups in the same order on every rank"
        if f" of group {self._flight.shown_group!r}" in status.text:
            advice = "the groups are different ones of the same name: make groups in the same order on every rank"
        advice = self._cure({peer: status.text}) or advice
        return CollectiveMismatch(f"{self._mine()} waits for rank {peer}, {', '.join(circle)}: {advice}")

    def _waits_for_message(self, peer: int, waits: Mapping[int, Status]) -> CollectiveMismatch:
        """Returns the error for an awaited rank that waits for a message, and so for this rank."""
        advice = "make all ranks of the group call the collective, or pass the message before it"
        advice = self._cure({rank: each.text for rank, each in waits.items()}) or advice
        return CollectiveMismatch(
            f"{self._mine()} waits for rank {peer}, which waits for a message instead, and so for this rank: "
            f"{described(waits)}: {advice}"
        )

    def blocks_for(self) -> int | None:
        """Returns the rank that has to take part in this collective before the program makes another call.

        None if it cannot be known, as where other threads than the main one run the program's code.
        """
        flight = self._flight
        blocks = (
            self._awaited >= 0
            and flight.thread == main_thread().ident
            and self._backend.flight_recorder.callers() == {flight.thread}
            and not may_run_in_other_threads(flight.thread)
            and (self._is_called_here or is_waited_for(flight))
        )
        return self._awaited if blocks else None

    def _circle(self, status: Status) -> list[str]:
        """Returns for whom and where each rank waits, from the awaited rank on, if the last one waits for this rank.

        Empty if one of them may go on, or the circle goes by this rank: then those in it find it.

        Args:
            status: Status of the awaited rank.
        """
        texts: list[str] = []
        seen = set[int]()
        while status.standing == Standing.BLOCKED:
            context, sequence, awaited, _ = status.details
            if awaited == self._backend.rank:
                latest = self._backend.flight_recorder.latest(context)
                is_called = latest is not None and latest.sequence >= sequence
                is_closed = not is_called and self.blocks_for() is not None
                return [*texts, f"which waits for this rank {status.text}"] if is_closed else []
            if awaited in seen:
                break
            seen.add(awaited)
            texts.append(f"which waits for rank {awaited} {status.text}")
            # No call has the checksum 0, so a rank that has called the collective has another status.
            answers = self._backend.control.ask([awaited], Question(context, sequence, 0), ANSWER_SECONDS)
            if awaited not in answers:
                break
            status = answers[awaited]
        return []

    def _mixed_circle(self) -> dict[int, Status]:
        """Returns ranks that wait for the next one each, in collectives or for messages, the last one for this rank.

        Empty if one of them may go on, or if all wait alike. All are asked twice; see `message_cycle`.
        """
        found = self._walk()
        is_mixed = len({status.standing for status in found.values()}) == 2
        return found if is_mixed and _details(self._walk()) == _details(found) else {}

    def _walk(self) -> dict[int, Status]:
        backend, found = self._backend, dict[int, Status]()
        rank, before = self._awaited, backend.rank
        question, expected = Question(self._flight.context, self._flight.sequence, 0), None
        while rank != backend.rank:
            status = backend.control.ask([rank], question, ANSWER_SECONDS).get(rank)
            if expected is None and status is not None and status.standing in _NOT_CALLED:
                status = backend.control.ask([rank], wait_behind(before), ANSWER_SECONDS).get(rank)
            # A circle without this rank is found by its members.
            if status is None or status.standing not in (Standing.BLOCKED, Standing.WAITING) or rank in found:
                return {}
            found[rank] = status
            waits_for_message = status.standing == Standing.WAITING
            num_sent = status.details[2 if waits_for_message else 3]
            if expected is not None and num_sent != expected:
                return {}  # a message is on its way
            before = rank
            if waits_for_message:
                rank, expected, _, _ = status.details
                question = wait_behind(before)
            else:
                context, sequence, rank, _ = status.details
                question, expected = Question(context, sequence, 0), None
        if expected is None:
            latest = backend.flight_recorder.latest(question.context)
            is_awaited = latest is None or latest.sequence < question.sequence
        else:
            is_awaited = backend.control.num_sent(before) == expected
        return found if is_awaited and self.blocks_for() is not None else {}

    def disagreement(self, peer: int, theirs: str = "", detail: str = "") -> CollectiveMismatch:
        """Returns the error for a rank that makes other calls, with the first call in which the two differ.

        Args:
            peer: The backend's rank.
            theirs: The peer's operation according to its message. Empty if it is not known.
            detail: Reason for which its message was refused.
        """
        flight: OperationRecord | None = self._flight
        mine, first = self._mine(), None
        # A status compares a checksum of all calls so far. Walking back while it differs finds the first difference.
        while flight is not None:
            status = self._ask([peer], flight).get(peer)
            if status is None or status.standing != Standing.DIVERGED:
                break
            mine, theirs, first = f"{flight.with_marks()} on rank {self._backend.rank}", status.text, flight
            flight = self._backend.flight_recorder.find(flight.context, flight.sequence - 1)
        if detail and first is None:
            return CollectiveMismatch(f"{mine}: {detail}", peer, theirs)
        parted = first_at_other_lines(
            self._backend.flight_recorder,
            flight,
            lambda each: self._text_of(peer, each),
            (self._backend.rank, peer),
        )
        advice = cure_of({self._backend.rank: mine, peer: theirs})
        if not advice and first is not None and not parted:
            advice = advice_on(first.with_marks(), theirs) or self._lone(first)
        return CollectiveMismatch(
            f"{mine}, but {theirs} on rank {peer}{parted}: {advice or SAME_ARGUMENTS}", peer, theirs
        )

    def _lone(self, flight: OperationRecord) -> str:
        """Returns advice that names the only rank which differs from all others. Empty if there is none."""
        if len(self._ranks) < 3:
            return ""
        question = Question(flight.context, flight.sequence, 0)  # answered as by `_text_of`
        others = [rank for rank in self._ranks if rank != self._backend.rank]
        statuses = self._backend.control.ask(others, question, ANSWER_SECONDS)
        texts = {rank: each.text for rank, each in statuses.items() if each.standing == Standing.DIVERGED}
        found = lone({**texts, self._backend.rank: flight.with_marks()}) if len(texts) == len(others) else ""
        return found and f"{found}: {SAME_CALLS}"

    def mismatch(self) -> CollectiveMismatch | None:
        """Queries all ranks. Returns the error if one has called another operation in place of this one, else None."""
        return self._mismatch(self._ask(self._ranks))

    def departure(self, failure: PeerFailed) -> CollectiveMismatch:
        """Returns the error for a rank that closed its group, and so makes fewer calls than this one."""
        recorder, context = self._backend.flight_recorder, self._flight.context
        lines = self._backend.control.lines_left(failure.rank, context)
        agreed = recorder.find(context, max(lines)) if lines else None
        parted = first_at_other_lines(
            recorder,
            agreed,
            lambda each: f" at {lines[each.sequence]}" if each.sequence in lines else "",
            (self._backend.rank, failure.rank),
        )
        advice = cure_of({self._backend.rank: str(self._flight), failure.rank: ""}, have_ended=True) or SAME_ARGUMENTS
        has_left = f"rank {failure.rank} {failure.reason.removeprefix('it ')}"
        return CollectiveMismatch(f"{self._mine()}, but {has_left}{parted}: {advice}", departed=failure.rank)

    def timeout(self, seconds: float = ANSWER_SECONDS) -> Timeout:
        """Queries all ranks and returns the error for a timeout: the waited time, the ranks behind, and the others.

        Args:
            seconds: Time for the ranks to answer.

        Raises:
            CollectiveMismatch: a rank makes other calls.
        """
        waited = self._backend.now() - self._begun
        statuses = self._ask(self._ranks, seconds=seconds)
        if mismatch := self._mismatch(statuses):
            raise mismatch
        others = [rank for rank in self._ranks if rank != self._backend.rank]
        behind = [rank for rank in others if rank in statuses and statuses[rank].standing in _BEHIND]
        silent = [rank for rank in others if rank not in statuses]
        there = [rank for rank in others if rank in statuses and rank not in behind]
        culprits = [f"rank {rank}, which is {statuses[rank].text}" for rank in behind]
        culprits += [f"rank {rank}, which {silence(self._backend, rank, seconds)}" for rank in silent]
        if len(culprits) > _NAMED:
            culprits[_NAMED:] = [f"{len(culprits) - _NAMED} more"]
        separation = self._backend.control.separation(self._ranks)
        if not culprits:
            details = [f"rank {rank} is {statuses[rank].text}" for rank in there[:_NAMED]]
            text = "; ".join([separation, *details] if separation else details)
            return Timeout(f"waited {waited:.1f} s, though all ranks have called it: {text}")
        rest = f"; {listed(there)} {'has' if len(there) == 1 else 'have'} called it" if there else ""
        if behind and (cure := self._cure({rank: statuses[rank].text for rank in behind})):
            rest += f": if {listed(behind)} {'is' if len(behind) == 1 else 'are'} not only late, {cure}"
        elif any(statuses[rank].standing != Standing.BEFORE for rank in behind):
            rest += ": use groups in the same order on every rank, if these wait for each other"
        rest += separation and f"; {separation}"
        text = f"waited {waited:.1f} s for {'; and for '.join(culprits)}{rest}"
        return Timeout(text, tuple(sorted([*behind, *silent])))

    def _ask(
        self, ranks: Sequence[int], flight: OperationRecord | None = None, seconds: float = ANSWER_SECONDS
    ) -> Mapping[int, Status]:
        flight = flight or self._flight
        others = [rank for rank in ranks if rank != self._backend.rank]
        question = Question(flight.context, flight.sequence, flight.signature)
        return self._backend.control.ask(others, question, seconds)

    def _text_of(self, peer: int, flight: OperationRecord) -> str:
        """Returns a rank's text of one of its calls. Empty if it does not answer, or has forgotten the call."""
        # No call has the checksum 0, so the rank answers with the call itself.
        question = Question(flight.context, flight.sequence, 0)
        status = self._backend.control.ask([peer], question, ANSWER_SECONDS).get(peer)
        return status.text if status is not None and status.standing == Standing.DIVERGED else ""

    def _mismatch(self, statuses: Mapping[int, Status]) -> CollectiveMismatch | None:
        others = [rank for rank, status in statuses.items() if status.standing == Standing.DIVERGED]
        return self.disagreement(others[0]) if others else None

    def _cure(self, others: Mapping[int, str]) -> str:
        return cure_of({self._backend.rank: str(self._flight), **others})

    def _mine(self) -> str:
        return f"{self._flight} on rank {self._backend.rank}"


def _details(waits: Mapping[int, Status]) -> dict[int, tuple[int, ...]]:
    return {rank: status.details for rank, status in waits.items()}


def _links(waits: Mapping[int, Status], own: int) -> Iterator[str]:
    """Yields for whom and where each rank waits. The last one waits for this rank."""
    following = [*list(waits)[1:], own]
    for status, rank in zip(waits.values(), following, strict=True):
        if status.standing == Standing.WAITING:
            yield f"which waits in {status.text}"
        else:
            yield f"which waits for {'this rank' if rank == own else f'rank {rank}'} {status.text}"


def first_at_other_lines(
    recorder: FlightRecorder,
    flight: OperationRecord | None,
    theirs: Callable[[OperationRecord], str],
    ranks: Sequence[int],
) -> str:
    """Returns the first call that two ranks made at different lines, as after an extra call. Empty if there is none.

    Args:
        recorder: Record of one rank.
        flight: Its last call that agrees with the other rank's. None if there is none.
        theirs: Returns the other rank's text of the same call. Empty if it is not known.
        ranks: The two ranks.
    """
    found = ""
    for _ in range(_COMPARED):
        if flight is None or not (text := theirs(flight)):
            break
        # Cut alike, since a path may hold the words, too.
        sides = [each.partition(" after ")[0].rpartition(" at ")[2] for each in (str(flight), text)]
        if not all(CALLED_FROM in each for each in sides):  # not known of a call of the native library
            sides = [each.partition(CALLED_FROM)[0] for each in sides]
        here, there = sides
        if here != there:
            text = f"{here} on rank {ranks[0]} and {there} on rank {ranks[1]}"
            since = f"#{flight.sequence}" if flight.purpose is None or not flight.purpose.step else flight.purpose
            found = f"; their lines differ from {since} on, {text}"
        flight = recorder.find(flight.context, flight.sequence - 1)
    return found


def silence(backend: Backend, rank: int, seconds: float) -> str:
    """Returns a text about a rank that has not answered, with its last message if there was one."""
    heard = backend.control.last_heard(rank)
    last = f"; its last message was of {heard}" if heard else ""
    return f"did not answer rank {backend.rank} within {seconds:g} s: computing without a pause, or stopped{last}"


def _whole_minutes(seconds: float) -> float:
    return seconds // WARN_SECONDS * WARN_SECONDS


_OPERATION = re.compile(
    r"(?P<name>\w+)(?:\((?P<arguments>[^()]*)\))?(?: of (?P<rows>rows of )?(?P<dtype>\w+)(?P<shape>\[.*\]))?"
)
"""Text of a collective, as `Collective.note` writes it."""


def advice_on(mine: str, theirs: str) -> str:
    """Returns the arguments to make equal, if two ranks differ in these alone. Empty if they differ in more.

    Args:
        mine, theirs: operations of both ranks as text, with number, group and line.
    """
    here, there = mine.partition(", #"), theirs.partition(", #")
    one, other = _OPERATION.fullmatch(here[0]), _OPERATION.fullmatch(there[0])
    if here[2] != there[2] or one is None or other is None:
        return ""
    if any(one[part] != other[part] for part in ("name", "rows")) or (one["shape"] is None) != (other["shape"] is None):
        return ""
    of_tensors = [part for part in ("shape", "dtype") if one[part] != other[part]]
    arguments = [(match["arguments"] or "").split(", ") for match in (one, other)]
    names = [a.partition("=")[0] if "=" in a else "op" for a, b in zip(*arguments, strict=False) if a != b]
    what = f"{'rows' if one['rows'] else 'tensors'} of the same {' and '.join(of_tensors)}" if of_tensors else ""
    same = f"the same {' and '.join(names)}" if names else ""
    return f"give {' and '.join(filter(None, (what, same)))} on every rank" if what or same else ""


def lone(texts: Mapping[int, str]) -> str:
    """Returns a sentence on the only rank that calls another operation than all others. Empty if there is none.

    Args:
        texts: the operation of each rank of the group, as text.
    """
    counts = Counter(texts.values())
    if len(counts) != 2 or len(texts) < 3 or 1 not in counts.values():
        return ""
    others, odd = (text for text, _ in counts.most_common())
    rank = next(rank for rank, text in texts.items() if text == odd)
    mine, theirs = _name(odd), _name(others)
    return "" if mine == theirs else f"rank {rank} alone calls {mine} where all others call {theirs}"


def _name(text: str) -> str:
    return re.split(r" of |[,(]", text, maxsplit=1)[0].strip()
