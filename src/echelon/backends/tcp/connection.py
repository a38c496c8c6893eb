"""One socket to one peer, as a link of messages and as the way of control frames.

Neither direction blocks: each call moves as many bytes as the kernel takes or gives at once. The two directions are
independent. A payload without a buffer stays in the kernel, with all that follows it, until it has one (backpressure).
"""

from __future__ import annotations

import errno
import fcntl
import select
import socket
import struct
import termios
from collections.abc import Callable

import torch

from echelon.backends.delivery import PIECE_BYTES, IncomingMessage
from echelon.backends.formats import wire
from echelon.backends.formats.wire import Tag
from echelon.backends.memory import bytes_of
from echelon.backends.tcp.inbox import Head, Inbox
from echelon.backends.tcp.link import Link, Outgoing, Receiver, Sender, SendQueue
from echelon.backends.work import Work
from echelon.errors import EchelonError

_BUFFER_BYTES = 1 << 16
_READS_AT_ONCE = 64
"""Reads of one peer before the others get their turn."""
LINK_WAKING_BYTES = 4 * PIECE_BYTES
"""Bytes of a payload that arrive over a network before it is read. The network brings 64 KiB at a time, and a wake for
each takes longer than its copy. Within a host it is a piece, which is then still in the cache."""


class Connection:
    """Socket to `rank`, its link, and the epoll events that it waits for."""

    def __init__(
        self,
        rank: int,
        sock: socket.socket,
        max_message_bytes: int,
        waking_bytes: int = PIECE_BYTES,
        *,
        on_control: Callable[[int, wire.Frame], None],
        watch_for: Callable[[int], None],
    ) -> None:
        """Takes over a socket.

        Args:
            rank: of the peer.
            sock: connected.
            max_message_bytes: a larger payload is a ProtocolError.
            waking_bytes: bytes of a payload that arrive before the socket counts as readable.
            on_control: called with the peer's rank and each control frame.
            watch_for: sets the epoll events that the socket waits for.
        """
        sock.setblocking(False)
        self.rank = rank
        self.sock = sock
        self._watch_for = watch_for
        self._is_full = self._is_paused = False
        self.sender = SocketSender(sock, self._on_full)
        self.receiver = SocketReceiver(
            sock, max_message_bytes, waking_bytes, lambda frame: on_control(rank, frame), self._on_paused
        )
        self.link = Link(rank, self.sender, self.receiver)

    def _on_full(self, is_full: bool) -> None:
        self._is_full = is_full
        self._watch()

    def _on_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        self._watch()

    def _watch(self) -> None:
        if self.sock.fileno() < 0:  # a frame that was just read has ended the peer
            return
        # EPOLLRDHUP: a paused peer is not read, but the end of its connection still shows.
        events = select.EPOLLRDHUP if self._is_paused else select.EPOLLIN
        self._watch_for(events | select.EPOLLOUT if self._is_full else events)

    @property
    def has_input(self) -> bool:
        """Whether the kernel holds bytes of the peer."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    @property
    def unacknowledged_bytes(self) -> int:
        """Number of bytes in the kernel that the peer's kernel has not confirmed."""
        return int(struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, b"\0" * 4))[0])

    def fail(self, error: EchelonError) -> None:
        """Fails all messages in flight and closes the socket."""
        self.link.fail(error)
        self.sock.close()


# Larger messages are queued with a Work: the kernel seldom takes all of one, and the rest would be copied.
_AT_ONCE_BYTES = 1 << 14


class _Frame(Outgoing):
    __slots__ = ("parts",)

    def __init__(self, parts: list[memoryview], tag: Tag | None = None, work: Work[None] | None = None) -> None:
        super().__init__(tag, work)
        self.parts = parts
        """The bytes that are not written yet."""


class SocketSender(Sender):
    """Writer of messages and control frames to one socket."""

    def __init__(self, sock: socket.socket, on_full: Callable[[bool], None]) -> None:
        """Calls `on_full` with True when the kernel takes no more bytes, and with False when the queue is empty."""
        self.queue: SendQueue[_Frame] = SendQueue()
        self.num_unsent_words = 0
        """Number of control frames that are queued or partly written."""
        self._sock = sock
        self._on_full = on_full
        self._is_full = False

    @property
    def owes(self) -> bool:
        """Whether a frame is queued that the peer still needs."""
        # The rest of an abandoned message is of no use to the peer, but cannot be left out of the stream.
        return bool(self.queue) and (self.queue[0].tag is None or self.queue.is_needed)

    def send(self, head: bytes, tensor: torch.Tensor, tag: Tag, work: Work[None]) -> None:  # noqa: D102
        payload = bytes_of(tensor)
        self.queue.append(_Frame([memoryview(head), payload] if payload.nbytes else [memoryview(head)], tag, work))
        if not self._is_full:  # else the poller flushes when there is room
            self.flush()

    def put(self, head: bytes, tensor: torch.Tensor, tag: Tag) -> bool:  # noqa: D102
        if self.queue or self._is_full or tensor.nbytes > _AT_ONCE_BYTES:
            return False
        payload = bytes_of(tensor)
        try:
            sent = self._sock.sendmsg([head, payload])
        except OSError:  # full, or broken: `send` queues the message, or says why
            return False
        if sent < len(head) + payload.nbytes:
            # The caller may change the tensor, so the rest is copied.
            rest = memoryview(bytes(head) + bytes(payload))[sent:]
            frame = _Frame([rest], tag)
            frame.has_begun = True
            self.queue.append(frame)
            self._is_full = True  # else the kernel would have taken all: the poller writes the rest
            self._on_full(True)
        return True

    def send_word(self, frame: bytes) -> None:
        """Writes or queues a control frame. Raises OSError if the connection is broken."""
        self.queue.append(_Frame([memoryview(frame)]))
        self.num_unsent_words += 1
        if not self._is_full:
            self.flush()

    def flush(self) -> None:  # noqa: D102
        queue = self.queue
        while queue:
            frame = queue[0]
            parts = frame.parts
            try:
                sent = self._sock.sendmsg(parts)
            except BlockingIOError:
                break
            while parts and sent >= parts[0].nbytes:
                sent -= parts.pop(0).nbytes
            if parts:
                parts[0] = parts[0][sent:]
                frame.has_begun = True
                continue
            queue.popleft()
            if frame.tag is None:
                self.num_unsent_words -= 1
            if frame.work is not None:
                frame.work.complete()
        if bool(queue) != self._is_full:
            self._is_full = not self._is_full
            self._on_full(self._is_full)


class SocketReceiver(Receiver):
    """Parser of the frames that arrive on one socket."""

    def __init__(
        self,
        sock: socket.socket,
        max_message_bytes: int,
        waking_bytes: int,
        on_control: Callable[[wire.Frame], None],
        on_paused: Callable[[bool], None],
    ) -> None:
        """Starts at the begin of a frame.

        Args:
            sock: connected.
            max_message_bytes: a larger payload is a ProtocolError.
            waking_bytes: bytes of a payload that arrive before the socket counts as readable.
            on_control: called with each control frame.
            on_paused: called with True at a message without a buffer, and with False when reading goes on.
        """
        self.delivery: IncomingMessage | None = None
        self._sock = sock
        self._max_message_bytes = max_message_bytes
        self._waking_bytes = waking_bytes
        self._on_control = on_control
        self._on_paused = on_paused
        self._was_paused = False
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._payload_left = 0
        self._payload_size = 0
        self._mark = 1
        """SO_RCVLOWAT as it is set: bytes that arrive before the socket counts as readable."""

    @property
    def is_paused(self) -> bool:
        """Whether reading stops because the next message has no buffer yet."""
        return self.delivery is not None and not self.delivery.is_placed

    def take_in(self, inbox: Inbox) -> bool:
        """Reads the bytes that have arrived, up to a message without a buffer.

        Returns False: epoll reports the socket again when enough of a payload has come to be worth a call, or its last
        byte, or the end of the stream.

        Raises:
            ProtocolError: the peer sent bytes that are no frame.
            OSError: the connection is broken, or has ended.
        """
        self._read(inbox)
        is_paused = self.is_paused
        if is_paused != self._was_paused:
            self._was_paused = is_paused
            self._on_paused(is_paused)
        # SO_RCVLOWAT: the kernel wakes this rank for a worthwhile part of a payload, not for every packet.
        mark = 1 if is_paused else max(1, min(self._payload_left, self._waking_bytes))
        if mark != self._mark:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)
            self._mark = mark
        return False

    def fail(self, error: EchelonError) -> None:  # noqa: D102
        if self.delivery is not None:
            self.delivery.fail(error)
            self.delivery = None

    def _read(self, inbox: Inbox) -> None:
        for _ in range(_READS_AT_ONCE):
            self._parse(inbox)
            if self.is_paused:
                return
            target = self._target()
            try:
                size = self._sock.recv_into(target)
            except BlockingIOError:
                return
            if size == 0:
                raise ConnectionResetError(
                    errno.ECONNRESET, "its connection ended: the process died or exited without close()"
                )
            if self._payload_left and self._start == self._end:  # it was read straight into the payload's buffer
                self._advance(size)
            else:
                self._end += size
            if size < target.nbytes:  # the kernel has no more: another read would only say so
                break
        self._parse(inbox)

    def _target(self) -> memoryview:
        """Returns the memory for the next read: the payload's own buffer, or the connection's."""
        if self._payload_left:
            room = self.delivery.room(self._payload_size - self._payload_left) if self.delivery is not None else None
            return self._view[: self._payload_left] if room is None else room  # None: read and drop
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start > _BUFFER_BYTES // 2:
            left = self._end - self._start
            self._buffer[:left] = self._buffer[self._start : self._end]
            self._start, self._end = 0, left
        return self._view[self._end :]

    def _parse(self, inbox: Inbox) -> None:
        """Decodes every complete frame in the buffer, and copies the buffered part of its payload."""
        while self.delivery is None or self.delivery.is_placed:
            if self._payload_left:
                self._take_payload()
                if self._payload_left:
                    return
            elif self.delivery is not None:
                self._advance(0)
            body = self._start + wire.HEADER_BYTES
            if body > self._end:
                return
            header = self._view[self._start : body]
            payload = body + wire.extra_bytes(header)
            if payload > self._end:
                return
            frame = wire.decode(header, self._view[body:payload], self._max_message_bytes)
            self._start = payload
            self._payload_left = self._payload_size = frame.payload_bytes
            if frame.kind == wire.FrameKind.DATA:
                self.delivery = inbox.open(Head.of(frame), comes_whole=False)
            else:
                self._on_control(frame)

    def _take_payload(self) -> None:
        while size := min(self._payload_left, self._end - self._start):
            room = self.delivery.room(self._payload_size - self._payload_left) if self.delivery is not None else None
            if room is not None:
                size = min(size, room.nbytes)
                room[:size] = self._view[self._start : self._start + size]
            self._start += size
            self._advance(size)

    def _advance(self, size: int) -> None:
        """Counts `size` payload bytes as arrived, and finishes the message after the last."""
        self._payload_left -= size
        delivery = self.delivery
        if delivery is not None:
            delivery.wrote(self._payload_size - self._payload_left)
            if self._payload_left == 0:
                self.delivery = None
                delivery.finish()
