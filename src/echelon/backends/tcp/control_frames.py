"""Control frames of one rank: questions and their answers, revocations, and the ends of peers.

Called with the lock of `Progress` held; nothing blocks. A peer that exceeds a limit of this module is dropped with a
ProtocolError.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from threading import main_thread

from echelon.backends.formats import wire
from echelon.backends.status import Question, Standing, Status, blocked_in, status_of
from echelon.backends.tcp.parting import Parting
from echelon.backends.tcp.peers import Peers
from echelon.backends.work import Work
from echelon.call_site import may_run_in_other_threads
from echelon.errors import CollectiveMismatch, Failure, PeerFailed, ProtocolError
from echelon.operation_records import FlightRecorder

MAX_REVOKED_CONTEXTS = 16_384
"""Number of groups that one peer may revoke. Each is remembered for good, in up to 4 KiB."""
MAX_UNSENT_WORDS = 4_096
"""Number of control frames that may wait for a peer that goes on asking questions. Each takes up to 2 KiB."""


_DETAILED = re.compile(r"([0-9a-f]{1,16}(?::[0-9a-f]{1,16})*) (.*)", re.DOTALL)
"""Note of an answer: its details, and its text."""
_NUM_DETAILS = {Standing.BLOCKED: 4, Standing.WAITING: 4}


class StatusQuery:
    """One question to several ranks, and their answers. Its Work completes when no rank is left that could answer."""

    def __init__(self, question: Question, ranks: Iterable[int], work: Work[None]) -> None:
        self.question = question
        self.answers: dict[int, Status] = {}
        self.work = work
        self.awaited = frozenset(ranks)
        self._look()

    def take(self, rank: int, status: Status) -> None:
        """Stores the answer of a rank."""
        self.answers[rank] = status
        self.drop(rank)

    def drop(self, rank: int) -> None:
        """Stops waiting for the answer of a rank."""
        self.awaited -= {rank}
        self._look()

    def _look(self) -> None:
        if not self.awaited:
            self.work.complete()


class ControlFrames:
    """Control frames from and to the peers of one rank."""

    def __init__(self, peers: Peers, recorder: FlightRecorder, parting: Parting) -> None:
        """Starts without questions.

        Args:
            peers: send and deliver the frames.
            recorder: answers the peers' questions.
            parting: takes their counts of calls, and counts sent messages.
        """
        self._peers = peers
        self._mailbox = peers.mailbox
        self._recorder = recorder
        self._parting = parting
        self._queries: list[StatusQuery] = []
        self._num_revoked: Counter[int] = Counter()
        """Number of contexts that each rank was the first to revoke."""
        self._handlers: dict[wire.FrameKind, Callable[[int, wire.Frame], None]] = {
            wire.FrameKind.CLOSE: self._on_close,
            wire.FrameKind.FAILED: self._on_failed,
            wire.FrameKind.MISMATCH: self._on_mismatch,
            wire.FrameKind.QUESTION: self._on_question,
            wire.FrameKind.ANSWER: self._on_answer,
            wire.FrameKind.TALLY: parting.hear,
        }
        peers.on_end.append(self._on_end)

    def on_frame(self, rank: int, frame: wire.Frame) -> None:
        """Handles a frame of a peer."""
        self._handlers[frame.kind](rank, frame)

    def ask(self, query: StatusQuery) -> None:
        """Sends a question; the answers of ranks that are gone are not waited for."""
        question = query.question
        self._queries.append(query)
        frame = wire.Frame(wire.FrameKind.QUESTION, question.context, question.sequence, question.signature)
        for rank in query.awaited:
            self._peers.tell(frame, [rank])
            if rank not in self._peers.connections:  # gone before, or found gone by the write
                query.drop(rank)

    def message_wait(self, receiver: int) -> Status:
        """Returns this rank's status for `wait_behind(receiver)`: WAITING, unless the program may do anything else.

        BLOCKED if it waits in a collective.
        """
        wait, mailbox, main = self._recorder.message_wait, self._mailbox, main_thread().ident
        collectives = [each for each in self._recorder.under_way() if each.sequence]
        if (blocked := blocked_in(collectives, self._parting.num_sent(receiver))) is not None:
            return blocked
        if (
            wait is None
            or wait.thread != main
            or not mailbox.is_posted(wait.receive)
            or not self._recorder.callers() <= {main}
            or may_run_in_other_threads(main)
            # What is called at the end of a collective may send.
            or collectives
        ):
            return Status(Standing.BEFORE, self._recorder.activity())
        details = wait.peer, mailbox.num_come(wait.peer), self._parting.num_sent(receiver), wait.number
        return Status(Standing.WAITING, wait.text, details)

    def forget(self, query: StatusQuery) -> None:
        """Stops waiting for the answers to a question."""
        self._queries.remove(query)

    def revoke(self, context: int, ranks: Iterable[int], failure: Failure) -> Failure:
        """Revokes a context here and on other ranks; see `ControlPlane.revoke`."""
        first = self._peers.revoke(context, failure)
        if isinstance(first, PeerFailed):
            frame = wire.Frame(wire.FrameKind.FAILED, context, 0, first.rank, note=first.reason)
        else:
            departed = 0 if first.departed is None else first.departed + 1
            frame = wire.Frame(wire.FrameKind.MISMATCH, context, step=departed, note=str(first))
        self._peers.tell(frame, ranks)
        return first

    def _on_close(self, rank: int, frame: wire.Frame) -> None:
        self._peers.take_in_last(rank)
        self._mailbox.fail_peer(rank, PeerFailed(rank, frame.note, has_closed=True))

    def _on_failed(self, rank: int, frame: wire.Frame) -> None:
        failure = PeerFailed(frame.step, frame.note).told_by(rank)
        if frame.context:
            self._revoke_for(rank, frame.context, failure)
        else:
            self._peers.take_in_last(rank)
            self._mailbox.fail_peer(rank, failure)

    def _on_mismatch(self, rank: int, frame: wire.Frame) -> None:
        departed = frame.step - 1 if frame.step else None
        self._revoke_for(rank, frame.context, CollectiveMismatch(frame.note, departed=departed))

    def _revoke_for(self, rank: int, context: int, failure: Failure) -> None:
        """Revokes a context because a peer says so.

        Raises:
            ProtocolError: the peer has revoked more contexts than this rank remembers.
        """
        if self._mailbox.failures.revoked(context) is None:
            if self._num_revoked[rank] >= MAX_REVOKED_CONTEXTS:
                raise ProtocolError(
                    f"rank {rank} has revoked more than {MAX_REVOKED_CONTEXTS} groups, the most that other ranks keep: "
                    "start the job again, or close and open the group of all ranks earlier"
                )
            self._num_revoked[rank] += 1
        self._peers.revoke(context, failure)

    def _on_question(self, rank: int, frame: wire.Frame) -> None:
        connection = self._peers.connections.get(rank)
        if connection is not None and connection.sender.num_unsent_words >= MAX_UNSENT_WORDS:
            raise ProtocolError(
                f"rank {rank} sends queries, but has not read the last {MAX_UNSENT_WORDS} answers: "
                "it does not speak this protocol"
            )
        if frame.context:
            status = status_of(self._recorder, Question(frame.context, frame.sequence, frame.step))
        else:
            status = self.message_wait(frame.sequence - 1)
        details = ":".join(f"{number:x}" for number in status.details)
        note = f"{details} {status.text}" if details else status.text
        kind = wire.FrameKind.ANSWER
        self._peers.tell(wire.Frame(kind, frame.context, frame.sequence, status.standing, note=note), [rank])

    def _on_answer(self, rank: int, frame: wire.Frame) -> None:
        if frame.step not in list(Standing):
            raise ProtocolError(f"answer of unknown kind {frame.step}: the peer does not speak this protocol")
        status = Status(Standing(frame.step), frame.note)
        if expected := _NUM_DETAILS.get(status.standing):
            found = _DETAILED.fullmatch(frame.note)
            details = tuple(int(number, 16) for number in found[1].split(":")) if found else ()
            if found is None or len(details) != expected:
                raise ProtocolError("answer without its details: the peer does not speak this protocol")
            status = Status(status.standing, found[2], details)
        for query in self._queries:
            if query.question[:2] == (frame.context, frame.sequence):
                query.take(rank, status)
        self._peers.progress.wake()

    def _on_end(self, rank: int) -> None:
        for query in self._queries:
            query.drop(rank)
