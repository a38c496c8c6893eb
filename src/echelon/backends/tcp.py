"""Ranks connected by TCP, one socket for every pair.

Strategy. One lock guards everything; no call blocks while it holds it. All sockets are non-blocking and registered with
one epoll. A thread that waits on a Work polls for all peers until its Work is done; at most one thread polls at a time,
the others sleep on a condition, and the one that stops polling wakes another. A background thread polls only while
something is under way and no thread waits for anything; a thread that comes to wait pokes it (eventfd) and takes over.
A wait ends because its Work completes, its peer fails, or its time is up, and a peer fails when its connection ends,
when it says so, or, on the same machine, when its process dies (pidfd), even while children of that process still hold
its sockets.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from echelon.backends import wire
from echelon.backends.base import DEFAULT_TIMEOUT, Backend, Tag, Work
from echelon.backends.connection import Connection
from echelon.backends.lanes import Lanes
from echelon.backends.matching import Delivery, Mailbox, Receive
from echelon.backends.memory import bytes_of, check_tensor, dtype_code, dtype_of
from echelon.backends.rendezvous import Job, Member, Store, World, machine_id, meet, meet_through_store
from echelon.errors import AuthenticationError, EchelonError, PeerFailed, Timeout

T = TypeVar("T")
logger = logging.getLogger("echelon")

CONNECT_TIMEOUT = 60.0
"""Seconds that the ranks have to find each other unless told otherwise."""
_WARN_SECONDS = 60.0
"""A wait that takes this long is worth a warning."""
_LINGER_SECONDS = 5.0
"""How long `close` waits for the peers' kernels to confirm the last bytes."""


class TcpBackend(Backend):
    """Moves CPU tensors over one TCP connection per pair of ranks."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        master_addr: str = "127.0.0.1:29500",
        *,
        timeout: float = DEFAULT_TIMEOUT,
        connect_timeout: float = CONNECT_TIMEOUT,
        secret: bytes | None = None,
        run_id: str = "",
        restart: int = 0,
        max_message_bytes: int = wire.MAX_MESSAGE_BYTES,
    ) -> None:
        """Connects to all other ranks; returns when every pair is connected.

        Args:
            rank: this process, 0 to world_size - 1.
            world_size: the number of ranks; a world of one opens no socket.
            master_addr: "host:port" at which rank 0 listens, on exactly that address.
            timeout: seconds that a blocking call waits by default.
            connect_timeout: seconds that the ranks have to find each other.
            secret: what every rank must know; None: the variable ECHELON_SECRET.
            run_id: ranks of another run are refused.
            restart: ranks of another attempt at the same run are refused.
            max_message_bytes: a larger message from a peer is a ProtocolError.

        Raises:
            InvalidRank, InvalidWorldSize: the numbers are wrong.
            ConnectError: ranks are missing when the time is up (they are named), or this one was turned away.
            AuthenticationError: no secret, or not the others'.
        """
        super().__init__(rank, world_size, timeout)
        world = World((), {})
        if world_size > 1:
            job = Job(rank, world_size, _secret(secret), run_id, restart)
            world = meet(job, master_addr, connect_timeout)
        self._open(world, max_message_bytes)

    @classmethod
    def from_store(
        cls,
        rank: int,
        world_size: int,
        store: Store,
        store_host: str,
        *,
        secret: bytes,
        timeout: float = DEFAULT_TIMEOUT,
        connect_timeout: float = CONNECT_TIMEOUT,
        run_id: str = "",
        restart: int = 0,
        max_message_bytes: int = wire.MAX_MESSAGE_BYTES,
    ) -> TcpBackend:
        """Connects all ranks through a store that exists already, such as that of torchrun's agent.

        Args:
            rank: this process.
            world_size: the number of ranks.
            store: a torch.distributed.Store, or anything with its set, get and check.
            store_host: where the store is; this rank listens on its own address on the way there.
            secret: what every rank must know.
            timeout, connect_timeout, run_id, restart, max_message_bytes: as in the constructor.
        """
        backend = cls.__new__(cls)
        Backend.__init__(backend, rank, world_size, timeout)
        job = Job(rank, world_size, secret, run_id, restart)
        backend._open(meet_through_store(job, store, store_host, connect_timeout), max_message_bytes)
        return backend

    @property
    def name(self) -> str:  # noqa: D102
        return "tcp"

    def _open(self, world: World, max_message_bytes: int) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._background_wanted = threading.Condition(self._lock)
        self._mailbox = Mailbox()
        self._connections = {
            peer: Connection(peer, sock, max_message_bytes) for peer, sock in sorted(world.sockets.items())
        }
        self._writing: set[int] = set()
        self._waiters = 0
        self._polling = False
        self._background_polls = False
        self._background: threading.Thread | None = None
        self._attending: dict[int, int] = {}
        self._closed = False
        self._lanes = Lanes(f"echelon rank {self.rank}", self.timeout)
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._by_fd: dict[int, Callable[[int], None]] = {self._wakeup: self._on_wakeup}
        self._pidfds: dict[int, int] = {}
        self._epoll.register(self._wakeup, select.EPOLLIN)
        for connection in self._connections.values():
            self._watch_connection(connection)
        here = machine_id()
        for member in world.members:
            if member.rank != self.rank and member.machine == here:
                self._watch_process(member)
        _open_backends.add(self)

    def _watch_connection(self, connection: Connection) -> None:
        fd = connection.sock.fileno()
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._by_fd[fd] = lambda events: self._on_socket(connection, events)
        self._epoll.register(fd, select.EPOLLIN)

    def _watch_process(self, member: Member) -> None:
        try:
            pidfd = os.pidfd_open(member.pid)
        except ProcessLookupError:
            self._fail_peer(member.rank, PeerFailed(member.rank, f"its process {member.pid} has ended"))
            return
        self._pidfds[member.rank] = pidfd
        self._by_fd[pidfd] = lambda _: self._on_process_end(member)
        self._epoll.register(pidfd, select.EPOLLIN)

    # Sending and receiving

    def isend(self, tensor: torch.Tensor, dst: int, tag: int | Tag = 0, *, note: str = "") -> Work[None]:  # noqa: D102
        self.check_peer(dst, "dst")
        check_tensor(tensor, self.devices, "send")
        tag = Tag.of(tag)
        payload = bytes_of(tensor)
        head = wire.Frame(
            wire.FrameKind.DATA, *tag, dtype_code(tensor.dtype), tuple(tensor.shape), note, payload.nbytes
        ).encode()
        work: Work[None] = Work(self, f"send to rank {dst}, {tag}", self.timeout)
        with self._lock:
            if self._closed:
                raise self.closed_error()
            if error := self._mailbox.failure(dst, tag):  # then there may be no connection either
                work.complete(error=error)
                return work
            connection = self._connections[dst]
            connection.enqueue(head, payload, work)
            if dst not in self._writing:
                self._flush(connection)
            if not work.is_completed():
                self._call_background()
        return work

    def irecv(  # noqa: D102
        self, src: int, tag: int | Tag = 0, *, out: torch.Tensor | None = None, note: str | None = ""
    ) -> Work[torch.Tensor]:
        self.check_peer(src, "src")
        if out is not None:
            check_tensor(out, self.devices, "recv(out=)")
        tag = Tag.of(tag)
        work: Work[torch.Tensor] = Work(self, f"receive from rank {src}, {tag}", self.timeout)
        with self._lock:
            if self._closed:
                raise self.closed_error()
            self._mailbox.post(Receive(work, src, tag, out, note))
            if not work.is_completed():
                self._call_background()
        return work

    def cancel(self, work: Work[torch.Tensor]) -> None:  # noqa: D102
        with self._lock:
            error = Timeout(f"{work.description}: withdrawn after its time was up")
            if not self._mailbox.withdraw(work, error):
                for connection in self._connections.values():
                    if connection.delivery is not None:
                        connection.delivery.withdraw(work)
            work.complete(error=error)

    def start(self, function: Callable[[], T], description: str, lane: int = 0) -> Work[T]:  # noqa: D102
        if self._closed:
            raise self.closed_error()
        return self._lanes.start(function, description, lane)

    def attend(self) -> _Attendance:  # noqa: D102
        return _Attendance(self._attending)

    # Making progress

    def drive(self, work: Work[object], timeout: float | None) -> bool:
        """Polls, or waits for the thread that does, until `work` is completed; returns False when the time is up."""
        begin = time.monotonic()
        deadline = float("inf") if timeout is None else begin + timeout
        warn_at = begin + _WARN_SECONDS
        with self._lock:
            self._waiters += 1
            try:
                while not work.is_completed():
                    now = time.monotonic()
                    if now >= deadline:
                        return False
                    if now >= warn_at:
                        logger.warning("rank %d: %s: waiting since %.0f s", self.rank, work.description, now - begin)
                        warn_at = now + _WARN_SECONDS
                    self._progress(min(deadline, warn_at) - now)
                return True
            finally:
                self._waiters -= 1
                if self._waiters:
                    self._changed.notify_all()
                elif self._background is not None and self._is_busy():
                    self._background_wanted.notify()

    def _progress(self, seconds: float) -> None:
        """Polls once, or sleeps until the thread that polls has something to say. Called with the lock held."""
        if self._closed:
            raise self.closed_error()
        if not self._polling:
            self._poll(seconds)
            return
        if self._background_polls:
            os.eventfd_write(self._wakeup, 1)
        self._changed.wait(seconds)

    def _poll(self, seconds: float) -> None:
        self._polling = True
        self._lock.release()
        try:
            events = self._epoll.poll(seconds)
        finally:
            self._lock.acquire()
            self._polling = False
        if self._closed:
            self._changed.notify_all()
            return
        for fd, mask in events:
            if handler := self._by_fd.get(fd):
                handler(mask)
        if self._waiters > 1 or (self._waiters and self._background_polls):
            self._changed.notify_all()

    def _call_background(self) -> None:
        """Has the background thread drive what is under way, unless the caller said that it will wait for it."""
        if self._waiters or threading.get_ident() in self._attending:
            return
        if self._background is None:
            name = f"echelon rank {self.rank}, progress"
            self._background = threading.Thread(target=self._run_background, name=name, daemon=True)
            self._background.start()
        elif not self._background_polls:
            self._background_wanted.notify()

    def _run_background(self) -> None:
        with self._lock:
            while not self._closed:
                if self._waiters or self._polling or not self._is_busy():
                    self._background_wanted.wait()
                    continue
                self._background_polls = True
                self._poll(-1)
                self._background_polls = False

    def _is_busy(self) -> bool:
        if self._mailbox.num_posted or self._writing:
            return True
        return any(connection.delivery is not None for connection in self._connections.values())

    def _flush(self, connection: Connection) -> None:
        """Writes what can be written, and watches for room to write the rest."""
        try:
            connection.flush()
        except OSError as error:
            self._on_broken(connection, error.strerror or str(error))
            return
        watched = connection.rank in self._writing
        if connection.wants_to_write != watched:
            self._writing ^= {connection.rank}
            mask = select.EPOLLIN | (select.EPOLLOUT if not watched else 0)
            self._epoll.modify(connection.sock.fileno(), mask)
            if not watched and self._background_polls:
                os.eventfd_write(self._wakeup, 1)

    # What happens on the sockets

    def _on_wakeup(self, _: int) -> None:
        os.eventfd_read(self._wakeup)

    def _on_socket(self, connection: Connection, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush(connection)
        if events & ~select.EPOLLOUT and connection.rank in self._connections:
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            alive = connection.pump(lambda frame: self._on_frame(connection, frame))
        except OSError as error:  # a ProtocolError is a ConnectionError
            self._on_broken(connection, str(error) if isinstance(error, EchelonError) else error.strerror or str(error))
        else:
            if not alive:
                self._on_broken(connection, "its connection ended: the process died or exited without close()")

    def _on_frame(self, connection: Connection, frame: wire.Frame) -> Delivery | None:
        if frame.kind == wire.FrameKind.DATA:
            tag = Tag(frame.context, frame.sequence, frame.step)
            return self._mailbox.arrive(connection.rank, tag, frame.shape, dtype_of(frame.dtype), frame.note)
        if frame.kind == wire.FrameKind.GOODBYE:
            self._mailbox.fail_peer(connection.rank, PeerFailed(connection.rank, "it has closed its group"))
            return None
        origin = frame.step
        told = frame.note if origin == connection.rank else f"{frame.note} (told by rank {connection.rank})"
        if frame.context:
            self._mailbox.fail_context(frame.context, PeerFailed(origin, told))
        else:
            self._mailbox.fail_peer(connection.rank, PeerFailed(origin, told))
        return None

    def _on_process_end(self, member: Member) -> None:
        connection = self._connections.get(member.rank)
        if connection is not None:
            while self._has_input(connection):
                self._read(connection)
        self._fail_peer(member.rank, PeerFailed(member.rank, f"its process {member.pid} has ended"))

    def _has_input(self, connection: Connection) -> bool:
        """Whether a peer that is dead left something to read."""
        if connection.rank not in self._connections:
            return False
        try:
            return bool(connection.sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _on_broken(self, connection: Connection, reason: str) -> None:
        self._fail_peer(connection.rank, PeerFailed(connection.rank, reason))

    def _fail_peer(self, rank: int, error: PeerFailed) -> None:
        """Ends everything with a peer; the first cause stays."""
        cause = self._mailbox.fail_peer(rank, error)
        if connection := self._connections.pop(rank, None):
            del self._by_fd[connection.sock.fileno()]
            self._epoll.unregister(connection.sock)
            self._writing.discard(rank)
            connection.fail(cause)
        if (pidfd := self._pidfds.pop(rank, None)) is not None:
            del self._by_fd[pidfd]
            self._epoll.unregister(pidfd)
            os.close(pidfd)

    # The end

    def revoke(self, context: int, ranks: Iterable[int], failure: PeerFailed) -> PeerFailed:  # noqa: D102
        with self._lock:
            first = self._mailbox.fail_context(context, failure)
            if not self._closed:
                self._tell(wire.Frame(wire.FrameKind.FAILED, context, 0, first.rank, note=first.reason), ranks)
            return first

    def abort(self, reason: str, origin: int | None = None) -> None:  # noqa: D102
        with self._lock:
            if self._closed:
                return
            step = self.rank if origin is None else origin
            self._tell(wire.Frame(wire.FrameKind.FAILED, 0, 0, step, note=reason), self._connections)
        self._shut(timeout=0.5)

    def close(self, timeout: float | None = None) -> None:  # noqa: D102
        with self._lock:
            if self._closed:
                return
            self._tell(wire.Frame(wire.FrameKind.GOODBYE), self._connections)
        self._shut(_LINGER_SECONDS if timeout is None else timeout)

    def _tell(self, frame: wire.Frame, ranks: Iterable[int]) -> None:
        for rank in list(ranks):
            if connection := self._connections.get(rank):
                connection.enqueue(frame.encode())
                self._flush(connection)

    def _shut(self, timeout: float) -> None:
        """Waits until the peers' kernels have our last bytes, then frees everything."""
        deadline = time.monotonic() + timeout
        with self._lock:
            while not self._closed and self._holds_unsent() and (left := deadline - time.monotonic()) > 0:
                self._progress(min(left, 0.01))
            if self._closed:
                return
            self._closed = True
            _open_backends.discard(self)
            os.eventfd_write(self._wakeup, 1)
            self._mailbox.fail_all(self.closed_error())
            self._changed.notify_all()
            self._background_wanted.notify_all()
        if self._background is not None and self._background is not threading.current_thread():
            self._background.join()
        self._lanes.close(timeout)
        self._free()

    def _holds_unsent(self) -> bool:
        return any(
            connection.wants_to_write or connection.unacknowledged_bytes for connection in self._connections.values()
        )

    def _free(self) -> None:
        for connection in self._connections.values():
            connection.fail(self.closed_error())
        for fd in (self._wakeup, *self._pidfds.values()):
            os.close(fd)
        self._epoll.close()
        self._connections.clear()
        self._pidfds.clear()

    def _close_in_child(self) -> None:
        """Lets go of the sockets in a forked child, so that the parent's end is theirs too. Takes no lock."""
        self._closed = True
        for connection in self._connections.values():
            connection.sock.close()
        self._epoll.close()


class _Attendance:
    """Counts the calling thread among those that wait for what they start."""

    __slots__ = ("_attending",)

    def __init__(self, attending: dict[int, int]) -> None:
        self._attending = attending

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._attending[thread] = self._attending.get(thread, 0) + 1

    def __exit__(self, *_: object) -> None:
        thread = threading.get_ident()
        if self._attending[thread] == 1:
            del self._attending[thread]
        else:
            self._attending[thread] -= 1


def _secret(secret: bytes | None) -> bytes:
    """Returns the secret given, or the one in the environment."""
    found = secret if secret is not None else os.environ.get("ECHELON_SECRET", "").encode()
    if not found:
        raise AuthenticationError(
            "no secret: start the ranks with `echelon run`, set ECHELON_SECRET to the same random text for every rank, "
            "or pass secret="
        )
    return found


_open_backends: weakref.WeakSet[TcpBackend] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for backend in list(_open_backends):
        backend._close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)
