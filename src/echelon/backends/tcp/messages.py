"""Messages of one rank over the links to its peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from echelon._native import SPIN
from echelon.backends.delivery import ANY, Receive
from echelon.backends.formats import wire
from echelon.backends.formats.wire import Tag
from echelon.backends.memory import dtype_code, is_ordinary, new_tensor
from echelon.backends.messages import Messages, NativeMessage, PreparedReceive, PreparedSend
from echelon.backends.operators import Combine
from echelon.backends.tcp.link import Known
from echelon.backends.tcp.parting import Parting
from echelon.backends.tcp.peers import Peers
from echelon.backends.tcp.progress import WaitScope
from echelon.backends.work import Message, Received, Work
from echelon.errors import Closed, EchelonError, Timeout


class TcpMessages(Messages):
    """Sends and receives of one rank. A message takes the link of its peer: a socket, or memory that both map."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout: float,
        peers: Peers,
        parting: Parting,
        closed_error: Callable[[], Closed],
    ) -> None:
        super().__init__(rank, world_size, timeout)
        self.progress = peers.progress
        """Drives the Works of these messages."""
        self.links = peers.links
        self.mailbox = peers.mailbox
        self.failures = peers.mailbox.failures
        self.parting = parting
        self.inboxes = peers.inboxes
        self.poller = peers.poller
        self._peers = peers
        self._closed_error = closed_error

    def isend(self, tensor: torch.Tensor, dst: int, tag: int | Tag = 0, *, note: str = "") -> Work[None]:  # noqa: D102
        self.check_send(tensor, dst)
        if type(tag) is not Tag:
            tag = Tag.of(tag)
        return self.send_frame(message_head(tag, tensor.dtype, tensor.shape, note), tensor, dst, tag)

    def send_frame(self, head: bytes, tensor: torch.Tensor, dst: int, tag: Tag) -> Work[None]:
        """Starts to send a checked tensor behind the encoded head of its message."""
        progress = self.progress
        work: Work[None] = Work(progress, MessageDescription("send to", dst, tag), self.timeout)
        with progress.lock:
            if progress.is_closed:
                raise self._closed_error()
            if error := self.failures.of(dst, tag):
                work.complete(error=error)
                return work
            if tag.sequence == 0:
                self.parting.sent[dst].value += 1
            sender = self.links[dst].sender
            num_before = len(sender.queue)
            try:
                sender.send(head, tensor, tag, work)
            except (OSError, EchelonError) as failure:
                self._peers.on_send_error(dst, failure)
            if num_before and len(sender.queue) <= num_before:
                progress.wake_waiters()  # a message of another thread has left
            if not work.has_ended:
                progress.call_background()
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
        self.check_receive((src,), out)
        if type(tag) is not Tag:
            tag = Tag.of(tag)
        work: Work[torch.Tensor] = Work(self.progress, MessageDescription("receive from", src, tag), self.timeout)
        self._post(Receive(work, src, tag, out, note, must_fit=must_fit, combine=combine))
        return work

    def irecv_any(  # noqa: D102
        self, sources: Mapping[int, int], tag: int | Tag = 0, *, note: str | None = ""
    ) -> Work[Received]:
        self.check_receive(sources)
        tag = Tag.of(tag)
        work: Work[Received] = Work(self.progress, f"receive from any rank, {tag}", self.timeout)
        self._post(Receive(work, ANY, tag, None, note, sources))
        return work

    def _post(self, receive: Receive) -> None:
        progress = self.progress
        with progress.lock:
            if progress.is_closed:
                raise self._closed_error()
            self.mailbox.post(receive)
            self._peers.reader.on_post(receive, self.links)
            if not receive.work.has_ended:
                progress.call_background()

    def cancel(self, work: Work[Any]) -> None:  # noqa: D102
        error = Timeout(f"{work.description}: withdrawn after its timeout")
        with self.progress.lock:
            self.mailbox.withdraw(work, error, self._peers.deliveries())
            self.progress.wake()

    def will_wait(self) -> WaitScope:  # noqa: D102
        return self.progress.wait_scope

    def prepare_send(  # noqa: D102
        self, dst: int, tag: Tag, shape: torch.Size, dtype: torch.dtype, *, note: str = ""
    ) -> PreparedSend:
        if dst not in self.links:  # `start` says why
            return super().prepare_send(dst, tag, shape, dtype, note=note)
        return TcpSend(self, dst, tag, shape, dtype, note)

    def prepare_receive(  # noqa: D102
        self, src: int, tag: Tag, *, note: str | None = "", must_fit: bool = True
    ) -> PreparedReceive:
        if src not in self.links:
            return super().prepare_receive(src, tag, note=note, must_fit=must_fit)
        return TcpReceive(self, src, tag, note, must_fit)

    def brings_memory(self, src: int, num_bytes: int) -> bool:  # noqa: D102
        link = self.links.get(src)
        return link is not None and link.receiver.brings_memory(num_bytes)

    def unreceived(self) -> list[tuple[int, Tag]]:  # noqa: D102
        return sorted(self.mailbox.unclaimed)

    def keeps_messages(self, src: int) -> bool:  # noqa: D102
        link = self.links.get(src)
        return link is not None and link.receiver.is_in_memory

    # For messages that another way carries, announced here

    def when_ended(self, work: Work[Any], callback: Callable[[], None]) -> None:
        """Calls `callback` when a Work of these messages ends, in any thread and under the lock.

        It must neither wait nor send.
        """
        with self.progress.lock:
            work.on_completion(callback)

    def end(self, complete: Callable[[], object]) -> None:
        """Calls `complete`, which ends a Work that `progress` drives, and wakes the waiting threads."""
        with self.progress.lock:
            complete()
            self.progress.wake()


class TcpSend(PreparedSend):
    """Sends of one shape and dtype, with the encoded head of the message."""

    __slots__ = ("_failures", "_head", "_native", "_progress", "_put", "_queue", "_sent", "_tcp")

    def __init__(
        self, messages: TcpMessages, dst: int, tag: Tag, shape: torch.Size, dtype: torch.dtype, note: str
    ) -> None:
        super().__init__(messages, dst, tag, note)
        self._tcp = messages
        self._head = message_head(tag, dtype, shape, note)
        self._progress, self._failures = messages.progress, messages.failures
        # Messages of collectives are not counted.
        self._sent = None if tag.sequence else messages.parting.sent[dst]
        sender = messages.links[dst].sender
        self._queue, self._put = sender.queue, sender.prepare(self._head, tag, shape, dtype)
        self._native: NativeMessage | None = None
        message = sender.message(self._head, shape, dtype)
        if message is not None and self._sent is not None:
            progress, failures = self._progress, self._failures
            queues = self._queue, failures.peers, failures.contexts
            self._native = NativeMessage(
                message, shape, dtype, True, 0, self._sent, progress.lock, progress, None, queues
            )

    def at_once(self, tensor: torch.Tensor) -> bool:  # noqa: D102
        progress, failures = self._progress, self._failures
        with progress.lock:
            if progress.is_closed or self._queue:
                return False
            if (failures.peers or failures.contexts) and failures.of(self.dst, self.tag):
                return False
            if self._put(tensor):
                return False
            if self._sent is not None:
                self._sent.value += 1
            if self._queue:  # nobody waits for the rest that the kernel did not take
                progress.call_background()
            return True

    def native(self) -> NativeMessage | None:  # noqa: D102
        return self._native

    def start(self, tensor: torch.Tensor) -> Work[None]:  # noqa: D102
        self._tcp.check_send(tensor, self.dst)
        return self._tcp.send_frame(self._head, tensor, self.dst, self.tag)


_WAITING = 1
"""Result of `Known.take`: there is no message."""


class TcpReceive(PreparedReceive):
    """Receives of one rank's messages, which may lie in memory already."""

    __slots__ = ("_claimed", "_known", "_mailbox", "_native", "_progress", "_receiver", "_tcp")

    def __init__(self, messages: TcpMessages, src: int, tag: Tag, note: str | None, must_fit: bool) -> None:
        super().__init__(messages, src, tag, note, must_fit)
        self._tcp = messages
        self._progress, self._mailbox = messages.progress, messages.mailbox
        # Messages of collectives are not counted.
        self._claimed = None if tag.sequence else messages.mailbox.claimed[src]
        self._receiver = messages.links[src].receiver
        self._known: Known | None = None
        """The last message."""
        self._native: NativeMessage | None = None

    def at_once(self, out: torch.Tensor | None = None) -> Message | None:  # noqa: D102
        messages = self._mailbox.unclaimed.messages
        if messages and (self.src, self.tag) in messages:
            return self._take_unclaimed(out)
        known = self._known
        if known is None:
            known = self._known = self._receiver.known(self.tag, self._note)
            if known is None:
                return None
        tensor = new_tensor(known.shape, known.dtype) if out is None else out
        code = self._take(known, tensor)
        # The link is polled without the lock.
        if code == _WAITING and self._progress.may_spin() and self._tcp.poller.look_for(self._receiver):
            code = self._take(known, tensor)
        if not code:
            return Message(tensor, known.note, known.what)
        if code != _WAITING:
            self._known = self._native = None
        return None

    def native(self) -> NativeMessage | None:  # noqa: D102
        known = self._known
        if self._native is None and known is not None and known.message is not None and self._claimed is not None:
            mailbox, progress = self._mailbox, self._progress
            queues = mailbox.posted, mailbox.unclaimed.messages, mailbox.failures.peers, mailbox.failures.contexts
            self._native = NativeMessage(
                known.message,
                known.shape,
                known.dtype,
                False,
                SPIN if progress.may_spin() else 0,
                self._claimed,
                progress.lock,
                progress,
                self._receiver,
                queues,
            )
        return self._native

    def _take(self, known: Known, tensor: torch.Tensor) -> int:
        """Returns the result of `known.take`, or a higher number if another receive comes first."""
        progress, src = self._progress, self.src
        with progress.lock:
            # A large message that is still arriving comes before any record in the ring.
            if progress.is_closed or self._receiver.delivery is not None or not self._mailbox.is_free(src, self.tag):
                return _WAITING + 1
            code = known.take(tensor)
            if not code and self._claimed is not None:
                self._claimed.value += 1
            return code

    def _take_unclaimed(self, out: torch.Tensor | None) -> Message | None:
        if out is not None and not is_ordinary(out):
            return None
        with self._progress.lock:
            # At the limit `irecv` takes it: a receive resumes the paused peer.
            if self._progress.is_closed or self._tcp.inboxes[self.src].is_at_limit:
                return None
            message = self._mailbox.unclaimed.take_whole((self.src, self.tag), out, self._note)
            if message is not None and self._claimed is not None:
                self._claimed.value += 1
            return message


class MessageDescription(NamedTuple):
    """Description of a Work for a message, formatted only when it is shown: most are not."""

    what: str
    rank: int
    tag: Tag

    def __str__(self) -> str:
        return f"{self.what} rank {self.rank}, {self.tag}"


def message_head(tag: Tag, dtype: torch.dtype, shape: torch.Size, note: str) -> bytes:
    """Returns the encoded frame of a message, without its payload."""
    num_bytes = shape.numel() * dtype.itemsize
    return wire.Frame(wire.FrameKind.DATA, *tag, dtype_code(dtype), tuple(shape), note, num_bytes).encode()
