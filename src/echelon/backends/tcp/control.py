"""Control plane over the connections of one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from echelon.backends.control import ControlPlane
from echelon.backends.formats import wire
from echelon.backends.formats.wire import Tag
from echelon.backends.status import Question, Standing, Status
from echelon.backends.tcp.control_frames import ControlFrames, StatusQuery
from echelon.backends.tcp.parting import Parting
from echelon.backends.tcp.peers import Peers
from echelon.backends.tcp.process_watch import ProcessWatch
from echelon.backends.work import Work
from echelon.errors import Closed, CollectiveMismatch, Failure, Timeout
from echelon.operation_records import FlightRecorder
from echelon.wording import listed

_LINGER_SECONDS = 5.0
"""Seconds that `close` waits at most for the peers' kernels to confirm the last bytes."""
_ABORT_SECONDS = 0.5
"""Seconds that `abort` tries to send its reason to the peers."""


class TcpControl(ControlPlane):
    """Control plane of one rank: control frames over its connections, and the watch over processes of its machine."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        recorder: FlightRecorder,
        hosts: Sequence[int],
        peers: Peers,
        frames: ControlFrames,
        processes: ProcessWatch,
        parting: Parting,
    ) -> None:
        super().__init__(rank, world_size, recorder, hosts)
        self._difference: CollectiveMismatch | None = None
        self._progress = peers.progress
        self._mailbox = peers.mailbox
        self._peers = peers
        self._frames = frames
        self._processes = processes
        self._parting = parting

    @property
    def is_closed(self) -> bool:
        """Whether this rank has closed or aborted, or is a forked child's copy."""
        return self._progress.is_closed

    def poll(self) -> None:
        """Polls once without blocking, for a thread that waits for something other than a message."""
        with self._progress.lock:
            self._progress.poll_once()

    def check_open(self, context: int) -> None:
        """Raises Closed, or the failure that revoked a context as far as this rank has heard."""
        if self._progress.is_closed:
            raise self.closed_error()
        if error := self._mailbox.failures.contexts.get(context):
            raise error

    def failure(self, rank: int, context: int) -> Failure | None:
        """Returns why a collective of a context cannot finish with a rank, as far as this rank has heard, or None."""
        return self._mailbox.failures.of(rank, Tag(context, 1))

    # Questions and revocations

    def ask(  # noqa: D102
        self, ranks: Iterable[int], question: Question, timeout: float, until: Work[Any] | None = None
    ) -> dict[int, Status]:
        work: Work[None] = Work(self._progress, "answers")
        query = StatusQuery(question, set(ranks) - {self.rank}, work)
        with self._progress.lock:
            self._frames.ask(query)
            if until is not None:
                until.on_completion(work.complete)
        with suppress(Closed):
            self._progress.drive(work, timeout)  # type: ignore[arg-type]
        with self._progress.lock:
            self._frames.forget(query)
        return query.answers

    def message_wait(self, receiver: int) -> Status | None:  # noqa: D102
        with self._progress.lock:
            status = self._frames.message_wait(receiver)
        return status if status.standing == Standing.WAITING else None

    def num_sent(self, rank: int) -> int:  # noqa: D102
        return self._parting.num_sent(rank)

    def last_heard(self, rank: int) -> str:  # noqa: D102
        inbox = self._peers.inboxes.get(rank)
        if inbox is None or inbox.last is None:
            return ""
        # By this rank's record, which has the group and the user's call in words. Too old a call has left it.
        tag, note = inbox.last.tag, wire.readable(inbox.last.note)
        flight = self.recorder.find(tag.context, tag.sequence)
        return note.partition(" by ")[0] if flight is None else flight.call_of_group

    def lines_left(self, rank: int, context: int) -> Mapping[int, str]:  # noqa: D102
        with self._progress.lock:
            return self._parting.lines_left(rank, context)

    def revoke(self, context: int, ranks: Iterable[int], failure: Failure) -> Failure:  # noqa: D102
        with self._progress.lock:
            return self._frames.revoke(context, ranks, failure)

    # The end

    def join(self, context: int, ranks: Sequence[int]) -> None:  # noqa: D102
        with self._progress.lock:
            self._parting.join(context, ranks)

    def keep_silent(self) -> None:  # noqa: D102
        with self._progress.lock:
            self._parting.keep_silent()

    def difference(self) -> CollectiveMismatch | None:  # noqa: D102
        return self._difference

    def abort(self, reason: str, origin: int | None = None) -> None:  # noqa: D102
        step = self.rank if origin is None else origin
        self._leave(wire.Frame(wire.FrameKind.FAILED, 0, 0, step, note=reason), _ABORT_SECONDS)

    def close(self, timeout: float) -> None:  # noqa: D102
        close_reason = self.close_reason()
        kind = wire.FrameKind.CLOSE if close_reason.has_closed else wire.FrameKind.FAILED
        unsent = self._leave(wire.Frame(kind, step=self.rank, note=close_reason.reason), timeout)
        if unsent:
            raise Timeout(f"close of rank {self.rank}: {listed(unsent)} did not receive all messages in time")

    def _leave(self, close_reason: wire.Frame, timeout: float) -> list[int]:
        """Tells the peers, frees all connections, and returns the ranks that did not get all messages in `timeout`."""
        # Each step that polls gives up the lock meanwhile, so another thread may have closed the backend after it.
        in_good_order = close_reason.kind == wire.FrameKind.CLOSE
        progress, peers = self._progress, self._peers
        with progress.lock:
            if progress.is_closed:
                return []
            # The closing frame goes over the connection, and would overtake messages that are queued for another link.
            self._poll_while(lambda: _unwritten(peers), timeout)
            if progress.is_closed:
                return []
            if in_good_order:
                for rank in list(peers.connections):
                    for word in self._parting.words_for(rank):
                        peers.tell(word, [rank])
            peers.tell(close_reason)
            begin = time.monotonic()
            self._poll_while(lambda: _unconfirmed(peers) and _unsent(peers), timeout)
            seconds = min(timeout, _LINGER_SECONDS) - (time.monotonic() - begin)
            self._poll_while(lambda: _unconfirmed(peers), seconds)
            if not progress.is_closed and in_good_order:
                progress.poll_once()  # reads the closing frames of peers that closed before
                peers.reader.on_news()
            if progress.is_closed:  # another thread was faster
                return []
            if in_good_order:
                self._difference = self._parting.difference()
            unsent = _unsent(peers)
            self._mailbox.fail_all(self.closed_error())
            progress.close()
            peers.close(self.closed_error())
            self._processes.close()
        progress.free()
        return unsent

    def _poll_while(self, is_waiting: Callable[[], object], seconds: float) -> None:
        """Polls until nothing is waited for, the time is up, or another thread has closed the backend."""
        deadline = time.monotonic() + seconds
        while not self._progress.is_closed and (left := deadline - time.monotonic()) > 0 and is_waiting():
            self._progress.step(min(left, 0.01))


def _unsent(peers: Peers) -> list[int]:
    """Returns the ranks with messages that neither the kernel nor a link has taken."""
    return sorted({link.rank for link in peers.reader.links if link.sender.owes})


def _unwritten(peers: Peers) -> list[int]:
    """Returns the ranks with messages that are still queued for a link beside their connection."""
    connected = {connection.link for connection in peers.connections.values()}
    return [link.rank for link in peers.reader.links if link not in connected and link.sender.owes]


def _unconfirmed(peers: Peers) -> list[int]:
    """Returns the ranks with bytes that are queued, or in the kernel and not confirmed by their kernel."""
    connections = peers.connections.values()
    return [each.rank for each in connections if each.sender.queue or each.unacknowledged_bytes]
