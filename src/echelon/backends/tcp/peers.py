"""Peers of one rank: the link and the connection of each, and the end of a peer.

Strategy. A peer is gone when its connection ends or when it says so. On the same machine it is also gone when its
process ends. The first cause stays. But the kernel's buffer is drained before a peer is given up: its last frames may
hold the cause. Everything here is called with the lock of `Progress` held, and nothing blocks.

Messages take the link of their peer: its connection, unless the two share memory. Control frames always take the
connection.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterable, Mapping

from echelon.backends.connect.sockets import is_loopback
from echelon.backends.delivery import PIECE_BYTES, IncomingMessage
from echelon.backends.formats import wire
from echelon.backends.matching import Mailbox
from echelon.backends.tcp.connection import LINK_WAKING_BYTES, Connection
from echelon.backends.tcp.inbox import Inbox
from echelon.backends.tcp.link import Link, Memory
from echelon.backends.tcp.poller import Poller
from echelon.backends.tcp.progress import Progress
from echelon.backends.tcp.reader import Reader, reason_of
from echelon.errors import EchelonError, Failure, PeerFailed

_LOOPBACK_BUFFER_BYTES = 1 << 18
"""Bytes in flight over loopback: so few that they are still in the cache when they are received. All copies go through
memory otherwise, and an all-reduce of 64 MiB takes up to a third longer. Elsewhere, between two network namespaces of
one machine too, the kernel sizes its own buffer: with this limit 1 Gbit/s with 1 ms was a fifth slower."""


class Peers:
    """The other ranks, as far as they have not failed."""

    def __init__(self, poller: Poller, progress: Progress, mailbox: Mailbox, max_unclaimed_bytes: int) -> None:
        """Starts without peers.

        Args:
            poller: polls the sockets.
            progress: wakes the threads that wait.
            mailbox: takes the messages.
            max_unclaimed_bytes: limit on each peer's unclaimed messages.
        """
        self.poller = poller
        self.progress = progress
        self.mailbox = mailbox
        self._max_unclaimed_bytes = max_unclaimed_bytes
        self.reader = Reader(poller, progress, self.fail)
        self.inboxes: dict[int, Inbox] = {}
        """Of every rank, also of a failed one."""
        self.connections: dict[int, Connection] = {}
        self.links: dict[int, Link] = {}
        """The way of messages to each rank."""
        self.on_loopback: set[int] = set()
        """Ranks, also failed ones, whose connections stay in this machine."""
        self.on_end: list[Callable[[int], None]] = []
        """Called with each rank that has failed."""

    def connect(
        self,
        rank: int,
        sock: socket.socket,
        max_message_bytes: int,
        on_control: Callable[[int, wire.Frame], None],
    ) -> None:
        """Takes over the socket to a rank. `on_control` is called with each control frame that arrives."""
        # A host that vanishes without a FIN is detected after 10 s + 3 * 5 s.
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        stays_here = is_loopback(sock.getsockname()[0], sock.getpeername()[0])
        if stays_here:
            self.on_loopback.add(rank)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_BUFFER_BYTES)
        waking_bytes = PIECE_BYTES if stays_here else LINK_WAKING_BYTES
        fd = sock.fileno()
        connection = Connection(
            rank,
            sock,
            max_message_bytes,
            waking_bytes,
            on_control=on_control,
            watch_for=lambda events: self.poller.watch_for(fd, events),
        )
        self.inboxes[rank] = Inbox(rank, self.mailbox, self._max_unclaimed_bytes)
        self.connections[rank] = connection
        self.links[rank] = connection.link
        self.reader.links[connection.link] = self.inboxes[rank]
        self.poller.watch(fd, lambda events: self._on_socket(connection, events))

    def use_links(self, links: Mapping[int, Link], memory: Memory, doorbell: int) -> None:
        """Routes messages to and from these ranks over links in `memory` from now on.

        A rank that did so earlier may have sent, and closed, already: its messages are taken in before its end.
        """
        self.reader.watch_memory(links.values(), memory, doorbell)
        for rank, link in links.items():
            self.links[rank] = link
            self.reader.links[link] = self.inboxes[rank]
        self.reader.on_news()
        for rank in [rank for rank in links if rank not in self.connections]:
            self.fail(rank, PeerFailed(rank, "it is gone"))  # this text is not shown: the first cause stays

    def _on_socket(self, connection: Connection, events: int) -> None:
        if events & select.EPOLLOUT:
            self.flush(connection)
        if events & ~select.EPOLLOUT and connection.rank in self.connections:
            if connection.receiver.is_paused:
                self.reader.drain(connection)
            else:
                self.reader.read(connection.link)

    def flush(self, connection: Connection) -> None:
        """Writes queued frames as far as there is room."""
        try:
            connection.sender.flush()
        except OSError as error:
            self.reader.read_last(connection, reason_of(error))

    def on_send_error(self, rank: int, error: EchelonError | OSError) -> None:
        """Fails a peer to which nothing more can be sent."""
        connection = self.connections.get(rank)
        if connection is not None and self.links[rank] is connection.link:
            self.reader.read_last(connection, reason_of(error))
        else:
            self.fail(rank, PeerFailed(rank, reason_of(error)))

    def tell(self, frame: wire.Frame, ranks: Iterable[int] | None = None) -> None:
        """Sends a control frame to `ranks` (None: all); ranks that are gone are left out."""
        # A copy, and looked up again: a write may fail peers while the loop runs.
        for rank in list(self.connections if ranks is None else ranks):
            if connection := self.connections.get(rank):
                try:
                    connection.sender.send_word(frame.encode())
                except OSError as error:
                    self.reader.read_last(connection, reason_of(error))

    # The end of a peer

    def take_in_last(self, rank: int) -> None:
        """Takes in all messages of a peer that has announced its end over its connection."""
        if (connection := self.connections.get(rank)) and (link := self.links[rank]) is not connection.link:
            self.reader.finish(link)

    def fail(self, rank: int, error: PeerFailed) -> None:
        """Fails all operations with a peer and closes its connection; the first cause stays."""
        connection, link = self.connections.pop(rank, None), self.links.pop(rank, None)
        if link is not None and (connection is None or link is not connection.link):
            self.reader.finish(link)  # first: its messages have arrived
        cause = self.mailbox.fail_peer(rank, error)
        if link is not None:
            self.reader.remove(link)
            link.fail(cause)
        if connection is not None:
            self.reader.remove(connection.link)
            self.poller.forget(connection.sock.fileno())
            connection.fail(cause)
        for call in self.on_end:
            call(rank)
        self.progress.wake()

    def revoke(self, context: int, failure: Failure) -> Failure:
        """Fails the pending collectives of a context, and its later ones. Returns the first cause ever given."""
        first = self.mailbox.fail_context(context, failure, self.deliveries())
        for link in self.reader.links:
            link.sender.queue.abandon(context, first)
        self.reader.on_room()
        self.progress.wake()
        return first

    # State

    def deliveries(self) -> list[IncomingMessage]:
        """Returns the messages whose payload is arriving or paused."""
        return [delivery for link in self.reader.links if (delivery := link.receiver.delivery) is not None]

    def is_busy(self) -> bool:
        """Whether a receive, a send or a payload is in flight, so that a thread must poll."""
        # Called without the lock too (`Progress`): hence the copy. Called for each blocking operation.
        if self.mailbox.num_posted:
            return True
        for link in list(self.reader.links):
            delivery = link.receiver.delivery
            if link.sender.queue or (delivery is not None and delivery.is_placed):
                return True
        return False

    def close(self, error: EchelonError) -> None:
        """Closes all sockets; messages in flight end with `error`."""
        for link in self.reader.links:
            link.fail(error)
        for connection in self.connections.values():
            connection.sock.close()
        self.reader.links.clear()
        self.links.clear()
        self.connections.clear()

    def close_in_child(self) -> None:
        """Closes a forked child's copies of sockets: else the parent's end would not end its connections."""
        for connection in self.connections.values():
            connection.sock.close()
