"""Link: a path of messages between two ranks beside their TCP connection, such as memory that both map."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch

from echelon.backends.delivery import IncomingMessage
from echelon.backends.formats import wire
from echelon.backends.formats.wire import Tag
from echelon.backends.memory import dtype_of
from echelon.backends.work import Message, Work
from echelon.errors import EchelonError, ProtocolError


class Head(NamedTuple):
    """Header of a message, decoded."""

    tag: Tag
    shape: tuple[int, ...]
    dtype: torch.dtype
    note: str
    num_bytes: int
    """Size of the payload."""
    is_signed: bool
    """Whether the message belongs to a collective."""

    @classmethod
    def of(cls, frame: wire.Frame) -> Head:
        """Reads a frame.

        Raises:
            ProtocolError: the frame is no message.
            UnsupportedOp: this torch does not have its dtype.
        """
        if frame.kind != wire.FrameKind.DATA:
            raise ProtocolError(f"frame of kind {frame.kind} among messages: run one version of Echelon on all ranks")
        tag = Tag(frame.context, frame.sequence, frame.step)
        dtype = dtype_of(frame.dtype)
        return cls(tag, frame.shape, dtype, frame.note, frame.payload_bytes, wire.is_signed(frame.note))


class Arrivals(ABC):
    """Receiver of the messages that one rank sends."""

    @abstractmethod
    def take_small(self, head: Head, address: int) -> None:
        """Takes a message whose whole payload stands at `address`."""

    @abstractmethod
    def open(self, head: Head, *, comes_whole: bool) -> IncomingMessage:
        """Returns the incoming message that takes the payload; `comes_whole`: see `IncomingMessage`."""


class Link(ABC):
    """Both directions between this rank and one other. Not locked; no call blocks."""

    @property
    @abstractmethod
    def delivery(self) -> IncomingMessage | None:
        """The message whose payload is arriving."""

    @property
    @abstractmethod
    def wants_to_write(self) -> bool:
        """Whether a message is still queued."""

    @property
    @abstractmethod
    def owes(self) -> bool:
        """Whether a message is queued that has not been abandoned."""

    @abstractmethod
    def send(self, head: bytes, tensor: torch.Tensor, tag: Tag, work: Work[None]) -> None:
        """Writes a message, or queues it; `work` is completed when all of it is written.

        Args:
            head: the frame, without payload.
            tensor: contiguous; it must not change before the work is done.
            tag: of the message.
            work: see above.
        """

    @abstractmethod
    def put(self, head: bytes, tensor: torch.Tensor) -> bool:
        """Writes a message now if the queue is empty and all of it fits. False, without effect, otherwise."""

    @abstractmethod
    def flush(self) -> None:
        """Writes queued messages until there is no more room."""

    @abstractmethod
    def take_in(self, arrivals: Arrivals) -> bool:
        """Takes in the next message, or the part of it that has arrived. True if more may follow.

        Raises:
            ProtocolError: the peer wrote bytes that are no message.
        """

    @abstractmethod
    def has_written(self) -> bool:
        """Whether the peer has written messages that were not taken in. Needs no lock."""

    @abstractmethod
    def take(self, tag: Tag, out: torch.Tensor | None, note: str | None) -> Message | None:
        """Fast path: takes in the next message if its header equals the last one with `tag`. None otherwise.

        Args:
            tag: of the message.
            out: overwritten with the message; None: it comes as a new tensor.
            note: of the message; None: any.
        """

    @abstractmethod
    def abandon(self, context: int, error: EchelonError) -> None:
        """Fails the queued messages of a context's collectives; a partly written one is still written to its end."""

    @abstractmethod
    def fail(self, error: EchelonError) -> None:
        """Fails all messages in flight."""


class Memory(Protocol):
    """Memory that the links of one rank write to, and that the rank polls."""

    @property
    def doorbell(self) -> int:
        """File descriptor that becomes readable, with a new edge, when a peer writes while this rank sleeps."""
        ...

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
