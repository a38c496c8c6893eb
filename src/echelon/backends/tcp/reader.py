"""Reader of all links of one rank: messages of each peer in turn, and backpressure.

Strategy. Everything here is called with the lock of `Progress` held, and nothing blocks. The number of messages in a
turn is limited. So a peer that sends as fast as this rank reads keeps no other thread from the lock, and no other peer
from its turn.

An unclaimed message takes memory. A large one gets no buffer for 5 ms, so that a receive that is posted meanwhile gets
it written straight into its own. When a peer's unclaimed messages reach a limit, reading from it is paused until some
are claimed. An unread message holds up all that the peer sends after it. So it gets a buffer, limit permitting, as soon
as a receive waits for another message of that peer, and after 5 ms at the latest: within the limit, no order of sends
and receives can block.

Reading one link can resume another one that was paused, or find that a socket takes no answers any more. Such links are
queued and read one after the other, so the depth of the stack does not depend on the number of frames or peers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from echelon.backends.delivery import Receive
from echelon.backends.tcp.connection import Connection
from echelon.backends.tcp.inbox import Inbox
from echelon.backends.tcp.link import Link, Memory
from echelon.backends.tcp.poller import Poller
from echelon.backends.tcp.progress import Progress
from echelon.errors import EchelonError, PeerFailed, ProtocolError

_PAUSE_SECONDS = 0.005
"""Seconds for which a large unclaimed message gets no buffer. It took a stream of messages of 1 MiB from 1.24 times the
bare socket's time to 0.98 (benchmarks/tcp)."""
_MOST_AT_END = 1 << 17
"""Messages, or parts of them, that are read at most from a peer that has announced its end. A ring has room for 32,768
of the smallest messages, and the peer writes no more."""
_MOST_AT_ONCE = 64
"""Messages of one peer, or parts of a large one, that are read before the other peers get their turn."""
MAX_LAST_WORDS_SECONDS = 1.0
"""Seconds that the connection of a dead process is read at most: a child that holds the socket may send without end."""


class Reader:
    """Reads links into the inboxes of their peers."""

    def __init__(self, poller: Poller, progress: Progress, on_failure: Callable[[int, PeerFailed], None]) -> None:
        """Starts without links.

        Args:
            poller: runs the alarms of pauses.
            progress: wakes the threads that wait.
            on_failure: called with a peer whose link is broken.
        """
        self._poller = poller
        self._progress = progress
        self._on_failure = on_failure
        self.links: dict[Link, Inbox] = {}
        """The links of peers that have not failed, and the inboxes for their messages."""
        self._in_memory: list[Link] = []
        self._memory: Memory | None = None
        self._paused: dict[Link, int] = {}
        """Links whose next message has no buffer, and the number of the pause: an old alarm is ignored."""
        self._num_pauses = 0
        self._to_read: deque[Link] = deque()
        """Links to be read after the current one."""
        self._is_reading = False
        self._broken: dict[Link, tuple[Connection, str]] = {}
        """Links whose socket takes no more bytes, and the reason; bytes that the peer sent before are still read."""

    def watch_memory(self, links: Iterable[Link], memory: Memory, doorbell: int) -> None:
        """Reads these links when peers have written to `memory`; see `Poller.watch_memory`."""
        self._memory = memory
        self._in_memory = list(links)
        self._poller.watch_memory(memory, doorbell, self.on_news)

    def on_news(self) -> None:
        """Takes in new messages that peers have written to memory, and writes queued ones as far as there is room."""
        for link in self._in_memory:
            if link.sender.queue and link in self.links:
                try:
                    link.sender.flush()
                except EchelonError as error:
                    self._on_failure(link.rank, PeerFailed(link.rank, str(error)))
            self.read(link)

    def read(self, link: Link) -> None:
        """Reads a link, and the links that this resumes. A nested call only queues its link."""
        self._to_read.append(link)
        if self._is_reading:  # the outer call reads it: see "depth of the stack" above
            return
        self._is_reading = True
        try:
            while self._to_read:
                link = self._to_read.popleft()
                self._read_some(link)
                if link in self._broken and link in self.links:
                    connection, reason = self._broken.pop(link)
                    self.drain(connection)
                    self._on_failure(link.rank, PeerFailed(link.rank, reason))
        finally:
            self._is_reading = False

    def read_last(self, connection: Connection, reason: str) -> None:
        """Fails a peer whose socket takes no more bytes, after the frames that it sent: they may hold the cause."""
        self._broken[connection.link] = connection, reason
        self.read(connection.link)

    def _read_some(self, link: Link) -> None:
        inbox, receiver = self.links.get(link), link.receiver
        if inbox is None:  # its peer has failed meanwhile
            return
        try:
            for _ in range(_MOST_AT_ONCE):
                if not receiver.take_in(inbox):
                    break
            else:  # the turn was used up: the peer may have written more, so the poller must come back
                assert self._memory is not None
                self._memory.look_again()
                self._progress.wake()
        except (EchelonError, OSError) as error:
            self._on_failure(link.rank, PeerFailed(link.rank, reason_of(error)))
            return
        delivery = receiver.delivery
        if delivery is not None and delivery.needs_buffer and link not in self._paused:
            self._pause(link)

    # Backpressure

    def _pause(self, link: Link) -> None:
        delivery = link.receiver.delivery
        assert delivery is not None
        number = self._paused[link] = self._num_pauses = self._num_pauses + 1
        delivery.on_place = lambda: self._resume(link)
        self._poller.call_in(_PAUSE_SECONDS, lambda: self._end_pause(link, number))
        self._progress.wake()  # a thread that sleeps in the poller does not know of the alarm yet

    def _end_pause(self, link: Link, number: int) -> None:
        if self._paused.get(link) == number:
            self._go_on(link, is_wanted=True)

    def _resume(self, link: Link) -> None:
        """Reads on, because the next message has a buffer now, or is dropped."""
        self._paused.pop(link, None)
        if link in self.links:
            self.links[link].is_at_limit = False
            self.read(link)
            self._progress.wake_waiters()  # messages for other threads may have come after this one

    def on_post(self, receive: Receive, links: Mapping[int, Link]) -> None:
        """Resumes the paused links, of `links` by rank, that a new receive may match."""
        for rank in receive.sources or (receive.src,):
            if (link := links.get(rank)) is not None and (link in self._paused or self.links[link].is_at_limit):
                self._go_on(link, is_wanted=not receive.work.is_completed())

    def on_room(self) -> None:
        """Resumes the links that the limit has paused, because unclaimed messages were dropped."""
        for link, inbox in list(self.links.items()):
            if inbox.is_at_limit:
                self._go_on(link, is_wanted=False)

    def _go_on(self, link: Link, is_wanted: bool) -> None:
        if link not in self._paused:  # the limit was reached between two messages
            self.read(link)
            self._progress.wake_waiters()
            return
        delivery = link.receiver.delivery
        if delivery is not None and (is_wanted or self.links[link].is_at_limit):
            self.links[link].give_buffer(delivery)

    def remove(self, link: Link) -> None:
        """Ends the reading of a link."""
        self.links.pop(link, None)
        self._paused.pop(link, None)
        self._broken.pop(link, None)

    # The end of a peer

    def finish(self, link: Link) -> None:
        """Drains a link whose peer has announced its end over its connection. No limit counts: no more is coming."""
        inbox = self.links[link]
        inbox.is_last = True
        try:
            for _ in range(_MOST_AT_END):
                if (delivery := link.receiver.delivery) is not None and delivery.needs_buffer:
                    delivery.place()
                if not link.receiver.take_in(inbox):
                    return
            raise ProtocolError(
                f"{_MOST_AT_END} messages came after its CLOSE frame: the peer does not speak this protocol"
            )
        except EchelonError as error:
            self._on_failure(link.rank, PeerFailed(link.rank, str(error)))

    def drain(self, connection: Connection) -> bool:
        """Drains the kernel's buffer of a peer that is gone. True if it held anything.

        Raises nothing. Ends after a second: a child of the peer may hold the other end of the socket and go on sending.
        """
        found, link = False, connection.link
        deadline = time.monotonic() + MAX_LAST_WORDS_SECONDS
        while link in self.links and (link in self._paused or connection.has_input):
            if time.monotonic() > deadline or self.links[link].is_far_exceeded():
                return False
            found = True
            if link.receiver.delivery is not None:
                link.receiver.delivery.place()
            self._read_some(link)
        return found


def reason_of(error: EchelonError | OSError) -> str:
    """Returns why a link is broken, in words."""
    return str(error) if isinstance(error, EchelonError) else error.strerror or str(error)
