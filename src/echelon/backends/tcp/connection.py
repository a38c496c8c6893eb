"""One socket to one peer: a queue of frames to write, and a parser of the frames that arrive.

Neither direction blocks: each call moves as many bytes as the kernel takes or gives at once. The two directions are
independent. A payload without a buffer stays in the kernel, with all that follows it, until it has one (backpressure).
Not locked: the backend calls it under its own lock.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from echelon.backends.delivery import PIECE_BYTES, IncomingMessage
from echelon.backends.formats import wire
from echelon.backends.formats.wire import Tag
from echelon.backends.work import Work
from echelon.errors import EchelonError

_BUFFER_BYTES = 1 << 16
_READS_AT_ONCE = 64
"""Reads of one peer before the others get their turn."""
LINK_WAKING_BYTES = 4 * PIECE_BYTES
"""Bytes of a payload that arrive over a network before it is read. The network brings 64 KiB at a time, and a wake for
each takes longer than its copy. Within a host it is a piece, which is then still in the cache."""


class _Outgoing(NamedTuple):
    parts: list[memoryview]
    tag: Tag | None
    """None: a control frame."""
    work: Work[None] | None
    """None: nobody waits for this frame."""


class Connection:
    """The two directions of a socket to `rank`."""

    def __init__(self, rank: int, sock: socket.socket, max_message_bytes: int, waking_bytes: int = PIECE_BYTES) -> None:
        """Takes over a socket.

        Args:
            rank: of the peer.
            sock: connected.
            max_message_bytes: a larger payload is a ProtocolError.
            waking_bytes: bytes of a payload that arrive before the socket counts as readable.
        """
        self.rank = rank
        self.sock = sock
        self.delivery: IncomingMessage | None = None
        """The message whose payload is arriving."""
        self.num_unsent_words = 0
        """Number of control frames that are queued or partly written."""
        self._outgoing: deque[_Outgoing] = deque()
        self._max_message_bytes = max_message_bytes
        self._waking_bytes = waking_bytes
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._payload_left = 0
        self._payload_size = 0
        self._mark = 1
        """SO_RCVLOWAT as it is set: bytes that arrive before the socket counts as readable."""
        sock.setblocking(False)

    @property
    def is_held(self) -> bool:
        """Whether reading is paused because the next message has no buffer yet."""
        return self.delivery is not None and not self.delivery.is_placed

    @property
    def wants_to_write(self) -> bool:
        """Whether a frame is still queued."""
        return bool(self._outgoing)

    @property
    def unacknowledged_bytes(self) -> int:
        """Number of bytes in the kernel that the peer's kernel has not confirmed."""
        return int(struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, b"\0" * 4))[0])

    @property
    def owes(self) -> bool:
        """Whether a frame is queued that the peer still needs."""
        # The rest of an abandoned message is of no use to the peer, but cannot be left out of the stream.
        first = self._outgoing[0] if self._outgoing else None
        is_abandoned = first is None or (first.tag is not None and first.work is None)
        return not is_abandoned or any(outgoing.work is not None for outgoing in self._outgoing)

    def enqueue(self, head: bytes, payload: memoryview, tag: Tag, work: Work[None]) -> None:
        """Queues a message; `work` is completed when the kernel has taken all of it."""
        parts = [memoryview(head), payload] if payload.nbytes else [memoryview(head)]
        self._outgoing.append(_Outgoing(parts, tag, work))

    def enqueue_word(self, frame: bytes) -> None:
        """Queues a control frame."""
        self._outgoing.append(_Outgoing([memoryview(frame)], None, None))
        self.num_unsent_words += 1

    def abandon(self, context: int, error: EchelonError) -> None:
        """Fails the queued messages of a context's collectives; a partly written one is still written to its end."""
        kept: deque[_Outgoing] = deque()
        for number, outgoing in enumerate(self._outgoing):
            tag, work = outgoing.tag, outgoing.work
            if tag is None or not tag.is_collective_of(context):
                kept.append(outgoing)
                continue
            if work is not None:
                work.complete(error=error)
            if number == 0:  # part of it may be written: to stop there would put the stream out of step
                kept.append(outgoing._replace(work=None))
        self._outgoing = kept

    def flush(self) -> None:
        """Writes as many queued bytes as the kernel takes now. Raises OSError if the connection is broken."""
        while self._outgoing:
            parts, tag, work = self._outgoing[0]
            try:
                sent = self.sock.sendmsg(parts)
            except BlockingIOError:
                return
            while parts and sent >= parts[0].nbytes:
                sent -= parts.pop(0).nbytes
            if parts:
                parts[0] = parts[0][sent:]
                continue
            self._outgoing.popleft()
            self.num_unsent_words -= tag is None
            if work is not None:
                work.complete()

    def fail(self, error: EchelonError) -> None:
        """Fails all messages in flight and closes the socket."""
        for outgoing in self._outgoing:
            if outgoing.work is not None:
                outgoing.work.complete(error=error)
        self._outgoing.clear()
        if self.delivery is not None:
            self.delivery.fail(error)
            self.delivery = None
        self.sock.close()

    def pump(self, on_frame: Callable[[wire.Frame], IncomingMessage | None]) -> bool:
        """Reads the bytes that have arrived, up to a message without a buffer. False at the end of the stream.

        The socket counts as readable again when enough of a payload has come to be worth a call, or its last byte, or
        the end of the stream.

        Args:
            on_frame: called with every frame's head; for data it returns the delivery that takes the payload.

        Raises:
            ProtocolError: the peer sent bytes that are no frame.
            OSError: the connection is broken.
        """
        is_open = self._read(on_frame)
        # SO_RCVLOWAT: the kernel wakes this rank for a worthwhile part of a payload, not for every packet.
        mark = 1 if self.is_held else max(1, min(self._payload_left, self._waking_bytes))
        if mark != self._mark and is_open:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)
            self._mark = mark
        return is_open

    def _read(self, on_frame: Callable[[wire.Frame], IncomingMessage | None]) -> bool:
        for _ in range(_READS_AT_ONCE):
            self._parse(on_frame)
            if self.is_held:
                return True
            target = self._target()
            try:
                size = self.sock.recv_into(target)
            except BlockingIOError:
                return True
            if size == 0:
                return False
            if self._payload_left and self._start == self._end:  # it was read straight into the payload's buffer
                self._advance(size)
            else:
                self._end += size
            if size < target.nbytes:  # the kernel has no more: another read would only say so
                break
        self._parse(on_frame)
        return True

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

    def _parse(self, on_frame: Callable[[wire.Frame], IncomingMessage | None]) -> None:
        """Decodes every complete frame in the buffer, and copies the buffered part of its payload."""
        while not self.is_held:
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
            self.delivery = on_frame(frame)
            self._payload_left = self._payload_size = frame.payload_bytes

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
