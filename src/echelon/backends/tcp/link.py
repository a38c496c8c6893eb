"""Link between two ranks: a sending and a receiving end, over a socket or over memory that both map.

Not locked, and no call blocks: a backend uses a link under its own lock. Whoever sends or reads a message takes the
link of the peer, and does not know its kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from echelon.backends.delivery import IncomingMessage
from echelon.backends.formats.wire import Tag
from echelon.backends.memory import is_ordinary
from echelon.backends.tcp.inbox import Inbox
from echelon.backends.work import Work
from echelon.errors import EchelonError


class Outgoing:
    """Message, or control frame, that is not wholly written yet."""

    __slots__ = ("has_begun", "is_abandoned", "tag", "work")

    def __init__(self, tag: Tag | None, work: Work[None] | None) -> None:
        self.tag = tag
        """None: a control frame."""
        self.work = work
        """None: nobody waits for it."""
        self.has_begun = False
        """Whether a part of it may be written."""
        self.is_abandoned = False
        """Whether the peer does not need it any more."""


E = TypeVar("E", bound=Outgoing)


class SendQueue(deque[E]):
    """Messages of one sender that are not wholly written yet, in order."""

    @property
    def is_needed(self) -> bool:
        """Whether the peer still needs one of these messages."""
        # Not whether a caller waits: a send that counts as done may have left its last bytes here.
        return any(outgoing.tag is not None and not outgoing.is_abandoned for outgoing in self)

    def abandon(self, context: int, error: EchelonError) -> None:
        """Fails the messages of a context's collectives, and drops them unless they have begun.

        The rest of a message that has begun is still written, or the stream would be out of step.
        """
        kept = []
        for outgoing in self:
            if outgoing.tag is not None and outgoing.tag.is_collective_of(context):
                if outgoing.work is not None:
                    outgoing.work.complete(error=error)
                    outgoing.work = None
                outgoing.is_abandoned = True
                if not outgoing.has_begun:
                    continue
            kept.append(outgoing)
        self.clear()
        self.extend(kept)

    def fail(self, error: EchelonError) -> None:
        """Fails all messages."""
        for outgoing in self:
            if outgoing.work is not None:
                outgoing.work.complete(error=error)
        self.clear()


class Sender(ABC):
    """Sending end of a link."""

    queue: SendQueue[Any]
    """Messages that are not wholly written yet."""

    @property
    def owes(self) -> bool:
        """Whether a message is queued that the peer still needs."""
        return self.queue.is_needed

    @abstractmethod
    def send(self, head: bytes, tensor: torch.Tensor, tag: Tag, work: Work[None]) -> None:
        """Writes a message, or queues it; `work` is completed when all of it is written.

        Args:
            head: the frame, without payload.
            tensor: contiguous; it must not change before the work is done.
            tag: of the message.
            work: see above.

        Raises:
            OSError, EchelonError: the link is broken. The message is queued.
        """

    @abstractmethod
    def flush(self) -> None:
        """Writes queued messages until there is no more room. Raises as `send`."""

    def fail(self, error: EchelonError) -> None:
        """Fails all queued messages."""
        self.queue.fail(error)

    def put(self, head: bytes, tensor: torch.Tensor, tag: Tag) -> bool:  # noqa: ARG002
        """Fast path: writes a message now. False, without effect, if the queue is not empty or it does not fit."""
        return False

    def message(self, head: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> bytes | None:  # noqa: ARG002
        """Returns messages with one header as the native library takes them. None if it does not write this link."""
        return None

    def prepare(
        self,
        head: bytes,
        tag: Tag,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Callable[[torch.Tensor], int]:
        """Returns `put` for messages with one header: a function of the tensor, whose result is 0 if it was written.

        It is called with an empty queue, and writes no tensor of another shape or dtype, or one that needs checks.
        """

        def put(tensor: torch.Tensor) -> int:
            is_such = is_ordinary(tensor) and tensor.shape == shape and tensor.dtype == dtype
            return not (is_such and self.put(head, tensor, tag))

        return put


class Known(NamedTuple):
    """Fast path for messages with one header, which was checked."""

    take: Callable[[torch.Tensor], int]
    """Copies the next message into a tensor. Returns 0 if that was done, 1 if there is none, else a higher number."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    note: str
    what: str
    """Dtype and shape in words."""
    message: bytes | None = None
    """The messages as the native library takes them. None if it does not read this link."""


class Receiver(ABC):
    """Receiving end of a link."""

    delivery: IncomingMessage | None
    """The message whose payload is arriving."""
    is_in_memory = False
    """Whether messages stay in memory until they are taken in, and `has_written` shows them."""

    @abstractmethod
    def take_in(self, inbox: Inbox) -> bool:
        """Takes in the next message, or the part of it that has arrived. True if more may follow.

        Stops at a message without a buffer, until it has one, and where `inbox` is full.

        Raises:
            ProtocolError: the peer wrote bytes that are no message.
            OSError: the link is broken.
        """

    @abstractmethod
    def fail(self, error: EchelonError) -> None:
        """Fails the message that is arriving."""

    def brings_memory(self, num_bytes: int) -> bool:  # noqa: ARG002
        """Whether a message is received in the memory that its sender wrote; see `Messages.brings_memory`."""
        return False

    def has_written(self) -> bool:
        """Whether the peer has written messages that were not taken in, if that shows without a call. Needs no lock."""
        return False

    def look(self, seconds: float) -> bool:  # noqa: ARG002
        """Spins until `has_written`. False after some time. Needs no lock."""
        return False

    def known(self, tag: Tag, note: str | None) -> Known | None:  # noqa: ARG002
        """Returns the fast path for messages whose header equals the last one with `tag`. None if there is none.

        Args:
            tag: of the messages.
            note: of the messages; None: any.
        """
        return None


class Link:
    """Both ends of one rank towards `rank`."""

    __slots__ = ("rank", "receiver", "sender")

    def __init__(self, rank: int, sender: Sender, receiver: Receiver) -> None:
        self.rank = rank
        self.sender = sender
        self.receiver = receiver

    def fail(self, error: EchelonError) -> None:
        """Fails all messages in flight."""
        self.sender.fail(error)
        self.receiver.fail(error)


class Memory(Protocol):
    """Memory that the links of one rank write to, and that the rank polls."""

    @property
    def is_full(self) -> bool:
        """Whether a queued message has no room."""
        ...

    def has_news(self) -> bool:
        """Whether peers have written since `look`."""
        ...

    def look(self) -> bool:
        """Snapshots the peers' counters, before the links are read. True if they have changed."""
        ...

    def look_again(self) -> None:
        """Discards the snapshot of `look`, because not all messages were taken in."""
        ...

    def fall_asleep(self) -> bool:
        """Publishes that this rank sleeps. False if peers have written, so it must not sleep."""
        ...

    def wake_up(self) -> None:
        """Publishes that this rank is awake again."""
        ...
