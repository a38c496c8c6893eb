"""Ranks connected by TCP, one socket for every pair.

Strategy. `rendezvous` connects the pairs. `Peers` reads and writes the sockets. `Mailbox` pairs messages with receives.
`Progress` decides which thread polls; its one lock guards all state. A wait ends because its Work completes, its peer
fails, or its time is up. Closing waits until sent messages have left, and then for the other threads.
"""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch

from echelon.backends.base import Backend
from echelon.backends.connect.members import Job, Member, machine_id
from echelon.backends.connect.rendezvous import Store, World, meet, meet_through_store
from echelon.backends.delivery import ANY, Receive
from echelon.backends.formats import wire
from echelon.backends.formats.wire import Tag
from echelon.backends.lanes import Lanes
from echelon.backends.matching import Mailbox
from echelon.backends.memory import dtype_code
from echelon.backends.operators import Combine
from echelon.backends.status import Question, Status
from echelon.backends.tcp.link import Link, Memory
from echelon.backends.tcp.parting import Parting
from echelon.backends.tcp.peers import MAX_UNCLAIMED_BYTES, Peers, StatusQuery
from echelon.backends.tcp.poller import Poller
from echelon.backends.tcp.progress import Progress, WaitScope
from echelon.backends.work import DEFAULT_TIMEOUT, Message, Received, Work
from echelon.errors import (
    AuthenticationError,
    Closed,
    CollectiveMismatch,
    EchelonError,
    Failure,
    PeerFailed,
    Timeout,
)
from echelon.wording import listed

T = TypeVar("T")

CONNECT_TIMEOUT = 60.0
"""Default number of seconds that the ranks have to find each other."""
_LINGER_SECONDS = 5.0
"""Seconds that `close` waits at most for the peers' kernels to confirm the last bytes."""
_ABORT_SECONDS = 0.5
"""Seconds that `abort` tries to send its reason to the peers."""


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
        local_address: str | None = None,
        max_message_bytes: int = wire.MAX_MESSAGE_BYTES,
        max_unclaimed_bytes: int = MAX_UNCLAIMED_BYTES,
    ) -> None:
        """Connects to all other ranks; returns when every pair is connected.

        Args:
            rank: this process, 0 to world_size - 1.
            world_size: the number of ranks; a world of one opens no socket.
            master_addr: "host:port" at which rank 0 listens, on exactly that address.
            timeout: seconds that a blocking call waits by default.
            connect_timeout: seconds that the ranks have to find each other.
            secret: shared by all ranks; None: the variable ECHELON_SECRET.
            run_id: ranks of another run are refused.
            restart: ranks of another attempt at the same run are refused.
            local_address: of this host, to listen on and to dial from; None: rank 0 listens at `master_addr`, the
                others on their address on the way there.
            max_message_bytes: a larger message from a peer is a ProtocolError.
            max_unclaimed_bytes: reading from a peer pauses when its unclaimed messages take more memory.

        Raises:
            InvalidRank, InvalidWorldSize: the numbers are wrong.
            ConnectError: ranks are missing when the time is up (they are named), or this one was turned away.
            AuthenticationError: no secret, or not the others'.
        """
        super().__init__(rank, world_size, timeout)
        world = World((), {})
        if world_size > 1:
            job = Job(rank, world_size, _secret(secret), run_id, restart)
            world = meet(job, master_addr, connect_timeout, local_address)
        self._open(world, max_message_bytes, max_unclaimed_bytes)

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
        local_address: str | None = None,
        max_message_bytes: int = wire.MAX_MESSAGE_BYTES,
        max_unclaimed_bytes: int = MAX_UNCLAIMED_BYTES,
    ) -> TcpBackend:
        """Connects all ranks through a store that exists already, such as that of torchrun's agent.

        Args:
            rank: this process.
            world_size: the number of ranks.
            store: a torch.distributed.Store, or anything with its set, get and check.
            store_host: where the store is; this rank listens on its own address on the way there.
            secret: shared by all ranks.
            timeout, connect_timeout, run_id, restart, local_address, max_message_bytes, max_unclaimed_bytes: as in the
                constructor.
        """
        backend = cls.__new__(cls)
        Backend.__init__(backend, rank, world_size, timeout)
        job = Job(rank, world_size, secret, run_id, restart)
        world = meet_through_store(job, store, store_host, connect_timeout, local_address)
        backend._open(world, max_message_bytes, max_unclaimed_bytes)
        return backend

    @property
    def name(self) -> str:  # noqa: D102
        return "tcp"

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of each rank, by number: ranks share one that can see each other's processes."""
        return self._hosts

    @property
    def members(self) -> tuple[Member, ...]:
        """Host, port and process of every rank, by rank. Empty if the world size is 1."""
        return self._members

    @property
    def is_closed(self) -> bool:
        """Whether this backend was closed or aborted, or is a forked child's copy."""
        return self._progress.is_closed

    def _open(self, world: World, max_message_bytes: int, max_unclaimed_bytes: int) -> None:
        machines = list(dict.fromkeys(member.machine for member in world.members))
        self._hosts = tuple(machines.index(member.machine) for member in world.members) or (0,)
        self._members = world.members
        self.max_message_bytes = max_message_bytes
        """A larger message from a peer is a ProtocolError."""
        self._mailbox = Mailbox()
        here = machine_id() if world.members else ""
        self._has_cores = self._hosts.count(self._hosts[self.rank]) <= len(os.sched_getaffinity(0))
        self._lanes = Lanes(f"echelon rank {self.rank}", self.timeout)
        self._poller = poller = Poller()
        self._progress = Progress(self.rank, poller, lambda: self._peers.is_busy(), self._may_spin, self.closed_error)
        self._parting = Parting(self.rank, self.flight_recorder, self._mailbox)
        self._difference: CollectiveMismatch | None = None
        recorder = self.flight_recorder
        self._peers = Peers(poller, self._progress, self._mailbox, recorder, self._parting, max_unclaimed_bytes)
        with self._progress.lock:
            for peer, sock in sorted(world.sockets.items()):
                self._peers.connect(peer, sock, max_message_bytes)
            for member in world.members:
                if member.rank != self.rank and member.machine == here:
                    self._peers.watch_process(member)
            if world.sockets:
                self._progress.start_background()
        _open_backends.add(self)

    def __repr__(self) -> str:
        state = ", closed" if self._progress.is_closed else ""
        return f"<TcpBackend: rank {self.rank} of {self.world_size}{state}>"

    def _may_spin(self) -> bool:
        """Whether the calling thread may spin while it waits: every rank of the host has a core, no lane needs it."""
        # With 4 ranks on 2 cores, spinning made small messages 2 to 5 times slower (benchmarks/tcp).
        return self._has_cores and not self._lanes.runs_beside()

    def use_lines(self, lines: Mapping[int, Link], memory: Memory) -> None:
        """Routes messages to and from these ranks over links from now on; the links write to `memory`."""
        with self._progress.lock:
            self._peers.use_lines(lines, memory)
            self._progress.wake()

    # Sending and receiving

    def isend(self, tensor: torch.Tensor, dst: int, tag: int | Tag = 0, *, note: str = "") -> Work[None]:  # noqa: D102
        tag = self.checked_send(tensor, dst, tag)
        head = message_head(tag, tensor.dtype, tensor.shape, note)
        work: Work[None] = Work(self, Passage("send to", dst, tag), self.timeout)
        with self._progress.lock:
            if self._progress.is_closed:
                raise self.closed_error()
            if error := self._mailbox.failure(dst, tag):
                work.complete(error=error)
            else:
                if tag.sequence == 0:
                    self._parting.sent[dst] += 1
                self._peers.send(dst, head, tensor, tag, work)
                if not work.is_completed():
                    self._progress.call_background()
        return work

    def irecv(  # noqa: D102
        self,
        src: int,
        tag: int | Tag = 0,
        *,
        out: torch.Tensor | None = None,
        note: str | None = "",
        must_fit: bool = True,
        combine: Combine | None = None,
    ) -> Work[torch.Tensor]:
        tag = self.checked_receive(src, tag, out)
        work: Work[torch.Tensor] = Work(self, Passage("receive from", src, tag), self.timeout)
        self._post(Receive(work, src, tag, out, note, must_fit=must_fit, combine=combine))
        return work

    def irecv_any(  # noqa: D102
        self, sources: Mapping[int, int], tag: int | Tag = 0, *, note: str | None = ""
    ) -> Work[Received]:
        tag = self.checked_receive_any(sources, tag)
        work: Work[Received] = Work(self, f"receive from any rank, {tag}", self.timeout)
        self._post(Receive(work, ANY, tag, None, note, sources))
        return work

    # Fast paths: without a Work, and only over a link. A message that needs more is left to isend and irecv.

    def send_at_once(self, tensor: torch.Tensor, dst: int, tag: Tag, *, note: str = "") -> bool:  # noqa: D102
        line = self._peers.line(dst)
        if line is None or not (tensor.is_cpu and tensor.layout is torch.strided):
            return False
        with self._progress.lock:
            if self._progress.is_closed or self._mailbox.failure(dst, tag):
                return False
            is_sent = line.put(message_head(tag, tensor.dtype, tensor.shape, note), tensor)
            if is_sent and tag.sequence == 0:
                self._parting.sent[dst] += 1
            return is_sent

    def recv_at_once(  # noqa: D102
        self, src: int, tag: Tag, *, out: torch.Tensor | None = None, note: str | None = ""
    ) -> Message | None:
        line = self._peers.line(src)
        # The link is polled before the lock is taken: `has_written` needs none.
        if line is None or not (line.has_written() or (self._may_spin() and self._poller.look_for(line))):
            return None
        with self._progress.lock:
            if self._progress.is_closed or not self._mailbox.is_free(src, tag):
                return None
            message = line.take(tag, out, note)
            if message is not None and tag.sequence == 0:
                self._mailbox.claimed[src] += 1
            return message

    def _post(self, receive: Receive) -> None:
        with self._progress.lock:
            if self._progress.is_closed:
                raise self.closed_error()
            self._mailbox.post(receive)
            self._peers.on_post(receive)
            if not receive.work.is_completed():
                self._progress.call_background()

    def cancel(self, work: Work[torch.Tensor] | Work[Received]) -> None:  # noqa: D102
        error = Timeout(f"{work.description}: withdrawn after its timeout")
        with self._progress.lock:
            self._mailbox.withdraw(work, error, self._peers.deliveries())
            self._progress.wake()

    def start(self, function: Callable[[], T], description: str, lane: int = 0) -> Work[T]:  # noqa: D102
        if self._progress.is_closed:
            raise self.closed_error()
        return self._lanes.start(function, description, lane)

    def will_wait(self) -> WaitScope:  # noqa: D102
        return self._progress.will_wait()

    def drive(self, work: Work[object], timeout: float | None) -> bool:
        """Blocks until `work` is completed; returns False if `timeout` seconds (None: for ever) pass first."""
        return self._progress.drive(work, timeout)

    def when_ended(self, work: Work[Any], callback: Callable[[], None]) -> None:
        """Calls `callback` when a Work of this backend ends, in any thread and under the lock.

        It must neither wait nor send.
        """
        with self._progress.lock:
            work.on_completion(callback)

    def end(self, complete: Callable[[], object]) -> None:
        """Calls `complete`, which ends a Work that this backend drives, and wakes the waiting threads."""
        with self._progress.lock:
            complete()
            self._progress.wake()

    def poll_once(self) -> None:
        """Polls once without blocking, for a thread that waits for something other than a message."""
        with self._progress.lock:
            self._progress.poll_once()

    def revoked(self, context: int) -> EchelonError | None:
        """Returns the failure that revoked a context, as far as this rank has heard. None if it is not revoked."""
        return self._mailbox.revoked(context)

    def failure(self, rank: int, context: int) -> EchelonError | None:
        """Returns why a collective of a context cannot finish with a rank, as far as this rank has heard, or None."""
        return self._mailbox.failure(rank, Tag(context, 1))

    # Questions to other ranks

    def ask(self, ranks: Iterable[int], question: Question, timeout: float) -> dict[int, Status]:  # noqa: D102
        work: Work[None] = Work(self, "answers", self.timeout)
        inquiry = StatusQuery(question, set(ranks) - {self.rank}, work)
        with self._progress.lock:
            self._peers.ask(inquiry)
        with suppress(Closed):
            self._progress.drive(work, timeout)  # type: ignore[arg-type]
        with self._progress.lock:
            self._peers.forget(inquiry)
        return inquiry.answers

    def last_heard(self, rank: int) -> str:  # noqa: D102
        return wire.readable(self._peers.last_notes.get(rank, ""))

    # The end

    def revoke(self, context: int, ranks: Iterable[int], failure: Failure) -> Failure:  # noqa: D102
        with self._progress.lock:
            first = self._peers.revoke(context, failure)
            if isinstance(first, PeerFailed):
                frame = wire.Frame(wire.FrameKind.FAILED, context, 0, first.rank, note=first.reason)
            else:
                departed = 0 if first.departed is None else first.departed + 1
                frame = wire.Frame(wire.FrameKind.MISMATCH, context, step=departed, note=str(first))
            self._peers.tell(frame, ranks)
            return first

    def abort(self, reason: str, origin: int | None = None) -> None:  # noqa: D102
        step = self.rank if origin is None else origin
        self._leave(wire.Frame(wire.FrameKind.FAILED, 0, 0, step, note=reason), _ABORT_SECONDS)

    def close(self, timeout: float | None = None) -> None:
        """Drains the send queues, tells the peers and frees all resources. May be called twice.

        Args:
            timeout: seconds; None: the backend's.

        Raises:
            Timeout: a rank did not receive all messages sent to it in time.
        """
        close_reason = self.close_reason()
        kind = wire.FrameKind.CLOSE if close_reason.has_closed else wire.FrameKind.FAILED
        frame = wire.Frame(kind, step=self.rank, note=close_reason.reason)
        unsent = self._leave(frame, self.timeout if timeout is None else timeout)
        if unsent:
            raise Timeout(f"close of rank {self.rank}: {listed(unsent)} did not receive all messages in time")

    def join(self, context: int, ranks: Sequence[int]) -> None:  # noqa: D102
        with self._progress.lock:
            self._parting.join(context, ranks)

    def keep_silent(self) -> None:  # noqa: D102
        with self._progress.lock:
            self._parting.keep_silent()

    def difference(self) -> CollectiveMismatch | None:  # noqa: D102
        return self._difference

    def _leave(self, close_reason: wire.Frame, timeout: float) -> list[int]:
        """Tells the peers, frees all resources, and returns the ranks that did not get all messages in `timeout`."""
        # Each step that polls gives up the lock meanwhile, so another thread may have closed the backend after it.
        in_good_order = close_reason.kind == wire.FrameKind.CLOSE
        with self._progress.lock:
            if self._progress.is_closed:
                return []
            self._write_out(timeout)
            if self._progress.is_closed:
                return []
            if in_good_order:
                for rank in self._peers.ranks():
                    for word in self._parting.words_for(rank):
                        self._peers.tell(word, [rank])
            self._peers.tell(close_reason)
            self._linger(timeout)
            if not self._progress.is_closed and in_good_order:
                self._progress.poll_once()  # reads the closing frames of peers that closed before
                self._peers.take_in_lines()
            if self._progress.is_closed:  # another thread was faster
                return []
            if in_good_order:
                self._difference = self._parting.difference()
            unsent = self._peers.unsent()
            _open_backends.discard(self)
            self._mailbox.fail_all(self.closed_error())
            self._progress.close()
            self._peers.close(self.closed_error())
        self._progress.free()
        self._lanes.close(timeout)
        return unsent

    def _write_out(self, timeout: float) -> None:
        """Waits until all links have written their queues.

        The closing frame goes over the connection, and would overtake messages that are queued for a link.
        """
        deadline = time.monotonic() + timeout
        while not self._progress.is_closed and self._peers.unwritten() and time.monotonic() < deadline:
            self._progress.step(min(deadline - time.monotonic(), 0.01))

    def _linger(self, timeout: float) -> None:
        """Waits until the kernel has taken all bytes, then at most 5 s until the peers' kernels confirm them."""
        begin = time.monotonic()
        while not self._progress.is_closed:
            limit = timeout if self._peers.unsent() else min(timeout, _LINGER_SECONDS)
            left = begin + limit - time.monotonic()
            if left <= 0 or not self._peers.has_unconfirmed():
                return
            self._progress.step(min(left, 0.01))

    def _become_child(self) -> None:
        """Closes the copies of a forked child, without blocking or locks."""
        self._progress.become_child()
        self._peers.close_in_child()


class Passage(NamedTuple):
    """Description of a Work for a message, formatted only when it is shown: most are not."""

    what: str
    rank: int
    tag: Tag

    def __str__(self) -> str:
        return f"{self.what} rank {self.rank}, {self.tag}"


@functools.lru_cache(1024)
def message_head(tag: Tag, dtype: torch.dtype, shape: torch.Size, note: str) -> bytes:
    """Returns the encoded frame of a message, without its payload. Cached: a program repeats its messages."""
    num_bytes = shape.numel() * dtype.itemsize
    return wire.Frame(wire.FrameKind.DATA, *tag, dtype_code(dtype), tuple(shape), note, num_bytes).encode()


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


def _leave_all_to_the_parent() -> None:
    for backend in list(_open_backends):
        backend._become_child()
    _open_backends.clear()  # a grandchild would close the same numbers again, by then those of other files


os.register_at_fork(after_in_child=_leave_all_to_the_parent)
