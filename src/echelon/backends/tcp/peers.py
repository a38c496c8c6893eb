"""Peers of one rank: their connections and links, control frames, backpressure, and detection of failed peers.

Strategy. A peer is gone when its connection ends or when it says so. On the same machine it is also gone when its
process ends (pidfd), even while children of that process still hold its sockets. The first cause stays. But the
kernel's buffer is drained before a peer is given up: its last frames may hold the cause. Everything here is called with
the lock of `Progress` held, and nothing blocks.

An unclaimed message takes memory. A large one is left in the kernel for 5 ms, so that a receive that is posted
meanwhile gets it written straight into its buffer. When a peer's unclaimed messages reach a limit, reading from it is
paused until some are claimed. An unread message holds up all that the peer sends after it. So it is read, limit
permitting, as soon as a receive waits for another message of that peer, and after 5 ms at the latest: within the limit,
no order of sends and receives can block.

Reading one connection can resume another one that was paused, or find that a socket takes no answers any more. Such
connections are queued and read one after the other (`_read`), so the depth of the stack does not depend on the number
of frames or peers. A peer that exceeds a limit of this module is dropped with a ProtocolError.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

import torch

from echelon.backends.connect.members import Member
from echelon.backends.connect.sockets import is_loopback
from echelon.backends.delivery import PIECE_BYTES, IncomingMessage, Receive
from echelon.backends.formats import wire
from echelon.backends.formats.wire import Tag
from echelon.backends.matching import Mailbox
from echelon.backends.memory import bytes_of
from echelon.backends.status import Question, Standing, Status, status_of
from echelon.backends.tcp.connection import LINK_WAKING_BYTES, Connection
from echelon.backends.tcp.link import Arrivals, Head, Link, Memory
from echelon.backends.tcp.link_table import LinkTable, UnclaimedLimit
from echelon.backends.tcp.parting import Parting
from echelon.backends.tcp.poller import Poller
from echelon.backends.tcp.progress import Progress
from echelon.backends.work import Work
from echelon.errors import CollectiveMismatch, EchelonError, Failure, PeerFailed, ProtocolError
from echelon.operation_records import FlightRecorder


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


class MailboxArrivals(Arrivals):
    """Hands the messages of one rank to a mailbox: each finds its receive, or is kept until one is posted."""

    def __init__(self, rank: int, mailbox: Mailbox, last_notes: dict[int, str]) -> None:
        """Stores the note of the last collective message of `rank` in `last_notes`."""
        self._rank = rank
        self._mailbox = mailbox
        self._last_notes = last_notes

    def take_small(self, head: Head, address: int) -> None:  # noqa: D102
        if head.is_signed:
            self._last_notes[self._rank] = head.note
        self._mailbox.take_bytes(self._rank, head.tag, head.shape, head.dtype, head.note, address)

    def open(self, head: Head, *, comes_whole: bool) -> IncomingMessage:  # noqa: D102
        if head.is_signed:
            self._last_notes[self._rank] = head.note
        return self._mailbox.arrive(self._rank, head.tag, head.shape, head.dtype, head.note, comes_whole)


MAX_UNCLAIMED_BYTES = 1 << 30
"""Limit on the memory of one peer's unclaimed messages, beyond one message of any size."""
_HOLD_BYTES = 1 << 16
"""Unclaimed messages of more bytes are left in the kernel at first."""
_HOLD_SECONDS = 0.005
"""Seconds for which they are. It took a stream of messages of 1 MiB from 1.24 times the bare socket's time to 0.98
(benchmarks/tcp)."""
_LOOPBACK_BUFFER_BYTES = 1 << 18
"""Bytes in flight over loopback: so few that they are still in the cache when they are received. All copies go through
memory otherwise, and an all-reduce of 64 MiB takes up to a third longer. Elsewhere, between two network namespaces of
one machine too, the kernel sizes its own buffer: with this limit 1 Gbit/s with 1 ms was a fifth slower."""
_LAST_WORDS_SECONDS = 0.05
"""Seconds that the last bytes of a dead process may still be in flight."""
_MAX_LAST_WORDS_SECONDS = 1.0
"""Seconds that the connection of a dead process is read at most: a child that holds the socket may send without end."""
MAX_REVOKED_CONTEXTS = 16_384
"""Number of groups that one peer may revoke. Each is remembered for good, in up to 4 KiB."""
MAX_UNSENT_WORDS = 4_096
"""Number of control frames that may wait for a peer that goes on asking questions. Each takes up to 2 KiB."""


class Peers:
    """The connections of one rank, and the processes behind them."""

    def __init__(
        self,
        poller: Poller,
        progress: Progress,
        mailbox: Mailbox,
        recorder: FlightRecorder,
        parting: Parting,
        max_unclaimed_bytes: int,
    ) -> None:
        self._limit = UnclaimedLimit(mailbox, max_unclaimed_bytes)
        self._held: dict[int, int] = {}
        """Paused ranks, whose next message has no buffer, and the number of the pause: an old alarm is ignored."""
        self._num_holds = 0
        self._poller = poller
        self._progress = progress
        self._mailbox = mailbox
        self._recorder = recorder
        self._inquiries: list[StatusQuery] = []
        self.last_notes: dict[int, str] = {}
        """The note of the last collective message of each rank."""
        self._connections: dict[int, Connection] = {}
        self._arrivals: dict[int, MailboxArrivals] = {}
        self._lines = LinkTable(self._arrivals, self._limit, self.fail)
        """Messages to and from a rank with a link take the link, not the connection."""
        self._writing: set[int] = set()
        """Ranks whose socket is full: epoll watches for room."""
        self._to_read: deque[Connection] = deque()
        """Connections to be read after the current one."""
        self._is_reading = False
        self._broken: dict[int, str] = {}
        """Ranks whose socket takes no more bytes, and the reason; bytes that they sent before are still read."""
        self._num_revoked: Counter[int] = Counter()
        """Number of contexts that each rank was the first to revoke."""
        self._pidfds: dict[int, int] = {}
        self._ended_at: dict[int, float] = {}
        self._words: dict[wire.FrameKind, Callable[[int, wire.Frame], None]] = {
            wire.FrameKind.CLOSE: self._on_goodbye,
            wire.FrameKind.FAILED: self._on_failed,
            wire.FrameKind.MISMATCH: self._on_mismatch,
            wire.FrameKind.QUESTION: self._on_question,
            wire.FrameKind.ANSWER: self._on_answer,
            wire.FrameKind.TALLY: parting.hear,
        }

    # Watching

    def connect(self, rank: int, sock: socket.socket, max_message_bytes: int) -> None:
        """Takes over the socket to a rank."""
        # A host that vanishes without a FIN is detected after 10 s + 3 * 5 s.
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        stays_here = is_loopback(sock.getsockname()[0], sock.getpeername()[0])
        if stays_here:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_BUFFER_BYTES)
        waking_bytes = PIECE_BYTES if stays_here else LINK_WAKING_BYTES
        connection = self._connections[rank] = Connection(rank, sock, max_message_bytes, waking_bytes)
        self._arrivals[rank] = MailboxArrivals(rank, self._mailbox, self.last_notes)
        self._poller.watch(sock.fileno(), lambda events: self._on_socket(connection, events))

    def watch_process(self, member: Member) -> None:
        """Fails the rank of a process on this machine when the process ends."""
        try:
            pidfd = os.pidfd_open(member.pid)
        except OSError as error:
            if error.errno not in (errno.ESRCH, errno.EINVAL):  # EINVAL: the number of a thread, before Linux 6.9
                raise
            self.fail(member.rank, _ended(member))
            return
        self._pidfds[member.rank] = pidfd
        self._poller.watch(pidfd, lambda _: self._on_process_end(member))

    def use_lines(self, lines: Mapping[int, Link], memory: Memory) -> None:
        """Routes messages to and from these ranks over links from now on; the links write to `memory`.

        A rank that did so earlier may have sent, and closed, already: its messages are taken in before its end.
        """
        self._lines.use(lines, memory)
        self._poller.watch_memory(memory, self._lines.take_in)
        self._lines.take_in()
        for rank in [rank for rank in lines if rank not in self._connections]:
            self.fail(rank, PeerFailed(rank, "it is gone"))  # this text is not shown: the first cause stays

    # Sending

    def send(self, rank: int, head: bytes, tensor: torch.Tensor, tag: Tag, work: Work[None]) -> None:
        """Queues a message and writes as much of it as fits now. The peer must not have failed."""
        line = self._lines.of(rank)
        others_wait = line is not None and line.wants_to_write
        if self._lines.send(rank, head, tensor, tag, work):
            if others_wait:
                self._progress.wake_waiters()
            return
        connection = self._connections[rank]
        connection.enqueue(head, bytes_of(tensor), tag, work)
        if rank not in self._writing:  # a full socket: the poller flushes it when there is room
            self._flush(connection)

    def line(self, rank: int) -> Link | None:
        """Returns the link to a rank. None if messages take the connection."""
        return self._lines.of(rank)

    def tell(self, frame: wire.Frame, ranks: Iterable[int] | None = None) -> None:
        """Sends a control frame to `ranks` (None: all); ranks that are gone are left out."""
        # A copy, and looked up again: a flush may fail peers while the loop runs.
        for rank in list(self._connections if ranks is None else ranks):
            if connection := self._connections.get(rank):
                connection.enqueue_word(frame.encode())
                self._flush(connection)

    def ask(self, inquiry: StatusQuery) -> None:
        """Sends a question; the answers of ranks that are gone are not waited for."""
        question = inquiry.question
        self._inquiries.append(inquiry)
        frame = wire.Frame(wire.FrameKind.QUESTION, question.context, question.sequence, question.signature)
        for rank in inquiry.awaited:
            if rank in self._connections:
                self.tell(frame, [rank])
            if rank not in self._connections:  # gone before, or found gone by the flush
                inquiry.drop(rank)

    def forget(self, inquiry: StatusQuery) -> None:
        """Stops waiting for the answers to a question."""
        self._inquiries.remove(inquiry)

    def _flush(self, connection: Connection) -> None:
        if connection.rank in self._broken:
            return
        others_wait = connection.rank in self._writing
        try:
            connection.flush()
        except OSError as error:  # the frames that the peer sent before may hold the cause, so it is read first
            self._broken[connection.rank] = error.strerror or str(error)
            self._read(connection)
            return
        if connection.wants_to_write != (connection.rank in self._writing):
            self._writing ^= {connection.rank}
            self._watch(connection)
        if others_wait:
            self._progress.wake_waiters()

    def _watch(self, connection: Connection) -> None:
        """Sets the epoll events of a socket."""
        # EPOLLRDHUP: a paused peer is not read, but the end of its connection still shows.
        events = select.EPOLLRDHUP if connection.rank in self._held else select.EPOLLIN
        if connection.rank in self._writing:
            events |= select.EPOLLOUT
        self._poller.watch_for(connection.sock.fileno(), events)

    # Receiving

    def deliveries(self) -> list[IncomingMessage]:
        """Returns the messages whose payload is arriving or paused."""
        ends: list[Connection | Link] = [*self._connections.values(), *self._lines.all()]
        return [end.delivery for end in ends if end.delivery is not None]

    def on_post(self, receive: Receive) -> None:
        """Resumes reading the paused peers that a new receive may match."""
        if self._lines.on_post(receive):
            self._progress.wake()  # messages for other threads may have come, and more may stand in the link
        for rank in [rank for rank in self._held if rank == receive.src or rank in receive.sources]:
            if rank in self._limit.reached_by or not receive.work.is_completed():
                self._take_in(rank)

    def _on_socket(self, connection: Connection, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush(connection)
        if events & ~select.EPOLLOUT and connection.rank in self._connections:
            if connection.is_held:
                self._drain(connection)
            else:
                self._read(connection)

    def _read(self, connection: Connection) -> None:
        """Reads a connection, and the connections that this resumes. A nested call only queues its connection."""
        self._to_read.append(connection)
        if self._is_reading:  # the outer call reads it: see "depth of the stack" above
            return
        self._is_reading = True
        try:
            while self._to_read:
                connection = self._to_read.popleft()
                rank = connection.rank
                if rank in self._connections:
                    self._read_some(connection)
                if rank in self._broken and rank in self._connections:
                    self._drain(connection)
                    self.fail(rank, PeerFailed(rank, self._broken[rank]))
        finally:
            self._is_reading = False

    def _read_some(self, connection: Connection) -> None:
        rank = connection.rank
        try:
            alive = connection.pump(lambda frame: self._on_frame(rank, frame))
        except EchelonError as error:
            self.fail(rank, PeerFailed(rank, str(error)))
        except OSError as error:
            self.fail(rank, PeerFailed(rank, error.strerror or str(error)))
        else:
            if not alive:
                self.fail(rank, PeerFailed(rank, "its connection ended: the process died or exited without close()"))
            elif connection.is_held and rank not in self._held:
                self._hold(connection)

    def _hold(self, connection: Connection) -> None:
        rank, delivery = connection.rank, connection.delivery
        assert delivery is not None
        number = self._num_holds = self._num_holds + 1
        self._held[rank] = number
        delivery.on_place = lambda: self._read_on(connection)
        self._watch(connection)
        self._poller.call_in(_HOLD_SECONDS, lambda: self._end_hold(rank, number))
        self._progress.wake()  # a thread that sleeps in the poller does not know of the alarm yet

    def _end_hold(self, rank: int, number: int) -> None:
        if self._held.get(rank) == number:
            self._take_in(rank)

    def _read_on(self, connection: Connection) -> None:
        rank = connection.rank
        self._held.pop(rank, None)
        self._limit.reached_by.discard(rank)
        if rank in self._connections:
            self._watch(connection)
            self._read(connection)
            self._progress.wake_waiters()  # messages for other threads may have come after this one

    def _take_in(self, rank: int) -> None:
        """Allocates a buffer for the paused message, unless the limit is reached."""
        delivery = self._connections[rank].delivery
        assert delivery is not None
        if not self._limit.exceeded_by(rank, delivery.memory_bytes):
            delivery.place()

    def _on_frame(self, rank: int, frame: wire.Frame) -> IncomingMessage | None:
        if frame.kind == wire.FrameKind.DATA:
            delivery = self._arrivals[rank].open(Head.of(frame), comes_whole=False)
            is_small = frame.payload_bytes <= _HOLD_BYTES
            # `awaits`: a receive waits for a message behind this one, so this one may not stay in the kernel.
            if (
                not delivery.is_placed
                and (is_small or self._mailbox.awaits(rank))
                and not self._limit.exceeded_by(rank, delivery.memory_bytes)
            ):
                delivery.place()
            return delivery
        self._words[frame.kind](rank, frame)
        return None

    def _on_goodbye(self, rank: int, frame: wire.Frame) -> None:
        self._lines.take_in_last(rank)
        self._mailbox.fail_peer(rank, PeerFailed(rank, frame.note, has_closed=True))

    def _on_failed(self, rank: int, frame: wire.Frame) -> None:
        failure = PeerFailed(frame.step, frame.note).told_by(rank)
        if frame.context:
            self._revoke_for(rank, frame.context, failure)
        else:
            self._lines.take_in_last(rank)
            self._mailbox.fail_peer(rank, failure)

    def _on_mismatch(self, rank: int, frame: wire.Frame) -> None:
        departed = frame.step - 1 if frame.step else None
        self._revoke_for(rank, frame.context, CollectiveMismatch(frame.note, departed=departed))

    def _revoke_for(self, rank: int, context: int, failure: Failure) -> None:
        """Revokes a context because a peer says so.

        Raises:
            ProtocolError: the peer has revoked more contexts than this rank remembers.
        """
        if self._mailbox.revoked(context) is None:
            if self._num_revoked[rank] >= MAX_REVOKED_CONTEXTS:
                raise ProtocolError(
                    f"rank {rank} has revoked more than {MAX_REVOKED_CONTEXTS} groups, the most that other ranks keep: "
                    "start the job again, or close and open the group of all ranks earlier"
                )
            self._num_revoked[rank] += 1
        self.revoke(context, failure)

    def _on_question(self, rank: int, frame: wire.Frame) -> None:
        connection = self._connections.get(rank)
        if connection is not None and connection.num_unsent_words >= MAX_UNSENT_WORDS:
            raise ProtocolError(
                f"rank {rank} sends queries, but has not read the last {MAX_UNSENT_WORDS} answers: "
                "it does not speak this protocol"
            )
        status = status_of(self._recorder, Question(frame.context, frame.sequence, frame.step))
        kind = wire.FrameKind.ANSWER
        self.tell(wire.Frame(kind, frame.context, frame.sequence, status.standing, note=status.text), [rank])

    def _on_answer(self, rank: int, frame: wire.Frame) -> None:
        if frame.step not in list(Standing):
            raise ProtocolError(f"answer of unknown kind {frame.step}: the peer does not speak this protocol")
        status = Status(Standing(frame.step), frame.note)
        for inquiry in self._inquiries:
            if inquiry.question[:2] == (frame.context, frame.sequence):
                inquiry.take(rank, status)
        self._progress.wake()

    # The end of a peer

    def fail(self, rank: int, error: PeerFailed) -> None:
        """Fails all operations with a peer and closes its connection; the first cause stays."""
        line = self._lines.end(rank)  # drains the link first: the messages in it have arrived
        cause = self._mailbox.fail_peer(rank, error)
        if line is not None:
            line.fail(cause)
        if connection := self._connections.pop(rank, None):
            self._poller.forget(connection.sock.fileno())
            self._writing.discard(rank)
            self._held.pop(rank, None)
            connection.fail(cause)
        if (pidfd := self._pidfds.pop(rank, None)) is not None:
            self._poller.forget(pidfd)
            os.close(pidfd)
        self._limit.reached_by.discard(rank)
        for inquiry in self._inquiries:
            inquiry.drop(rank)
        self._progress.wake()

    def revoke(self, context: int, failure: Failure) -> Failure:
        """Fails the pending collectives of a context, and its later ones. Returns the first cause ever given."""
        first = self._mailbox.fail_context(context, failure, self.deliveries())
        ends: list[Connection | Link] = [*self._connections.values(), *self._lines.all()]
        for end in ends:
            end.abandon(context, first)
        self._lines.take_in()  # dropped messages make room below the limit, so paused peers may go on
        self._progress.wake()
        return first

    def _on_process_end(self, member: Member) -> None:
        """Fails a rank whose process has ended, once its last bytes have arrived or are overdue."""
        # The pidfd stays readable, so the poller calls this again and again until the rank has failed.
        if connection := self._connections.get(member.rank):
            now = time.monotonic()
            ended_at = self._ended_at.setdefault(member.rank, now)
            is_overdue = now > ended_at + _MAX_LAST_WORDS_SECONDS
            if not is_overdue and (self._drain(connection) or now < ended_at + _LAST_WORDS_SECONDS):
                return
        self.fail(member.rank, _ended(member))

    def _drain(self, connection: Connection) -> bool:
        """Drains the kernel's buffer of a peer that is gone. True if it held anything.

        Raises nothing. Ends after a second: a child of the peer may hold the other end of the socket and go on sending.
        """
        found = False
        deadline = time.monotonic() + _MAX_LAST_WORDS_SECONDS
        while connection.rank in self._connections and (connection.is_held or _has_input(connection.sock)):
            if time.monotonic() > deadline or self._limit.is_far_exceeded(connection.rank):
                return False
            found = True
            if connection.delivery is not None:
                connection.delivery.place()
            self._read_some(connection)
        return found

    # The end of this rank

    def take_in_lines(self) -> None:
        """Takes in the messages that stand in the links, up to the unclaimed limit."""
        self._lines.take_in()

    def ranks(self) -> list[int]:
        """Returns the ranks that are still connected."""
        return list(self._connections)

    def is_busy(self) -> bool:
        """Whether a receive, a send or a payload is in flight, so that a thread must poll."""
        # Called without the lock too (`Progress`): hence the copy of the connections.
        if self._mailbox.num_posted or self._writing:
            return True
        for line in self._lines.all():
            if line.wants_to_write or ((delivery := line.delivery) is not None and delivery.is_placed):
                return True
        for connection in list(self._connections.values()):
            if (delivery := connection.delivery) is not None and delivery.is_placed:
                return True
        return False

    def unsent(self) -> list[int]:
        """Returns the ranks with messages that neither the kernel nor a link has taken."""
        owing = [rank for rank, connection in self._connections.items() if connection.owes]
        return sorted({*owing, *self.unwritten()})

    def unwritten(self) -> list[int]:
        """Returns the ranks with messages that are still queued for their link."""
        return self._lines.owing()

    def has_unconfirmed(self) -> bool:
        """Whether bytes are queued, or in the kernel and not confirmed by a peer's kernel."""
        return any(
            connection.wants_to_write or connection.unacknowledged_bytes for connection in self._connections.values()
        )

    def close(self, error: EchelonError) -> None:
        """Closes all sockets; messages in flight end with `error`."""
        for line in self._lines.all():
            line.fail(error)
        self._lines.clear()
        for connection in self._connections.values():
            connection.fail(error)
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._connections.clear()
        self._pidfds.clear()

    def close_in_child(self) -> None:
        """Closes a forked child's copies of sockets and pidfds: else the parent's end would not end its connections."""
        for connection in self._connections.values():
            connection.sock.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)


def _ended(member: Member) -> PeerFailed:
    return PeerFailed(member.rank, f"its process {member.pid} has ended")


def _has_input(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except OSError:
        return False
