"""What messages between two ranks may take instead of their connection: memory that both map, say."""

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
    """What a message says of itself."""

    tag: Tag
    shape: tuple[int, ...]
    dtype: torch.dtype
    note: str
    num_bytes: int
    """Of its payload."""
    is_signed: bool
    """Whether it is that of a collective."""

    @classmethod
    def of(cls, frame: wire.Frame) -> Head:
        """Reads a frame.

        Raises:
            ProtocolError: it is not that of a message.
            UnsupportedOp: this torch does not have its dtype.
        """
        if frame.kind != wire.FrameKind.DATA:
            raise ProtocolError(f"frame of kind {frame.kind} where only messages are sent: another version?")
        tag = Tag(frame.context, frame.sequence, frame.step)
        dtype = dtype_of(frame.dtype)
        return cls(tag, frame.shape, dtype, frame.note, frame.payload_bytes, wire.is_signed(frame.note))


class Arrivals(ABC):
    """What becomes of the messages that one rank sends."""

    @abstractmethod
    def take_small(self, head: Head, address: int) -> None:
        """Takes a message in whose payload is there, at this place in memory."""

    @abstractmethod
    def open(self, head: Head, *, comes_whole: bool) -> IncomingMessage:
        """Returns what takes the payload of a message; `comes_whole`: see `IncomingMessage`."""


class Link(ABC):
    """Both directions to one other rank. Not locked, and no call waits."""

    @property
    @abstractmethod
    def delivery(self) -> IncomingMessage | None:
        """The message whose payload is arriving."""

    @property
    @abstractmethod
    def wants_to_write(self) -> bool:
        """Whether something is still queued."""

    @property
    @abstractmethod
    def owes(self) -> bool:
        """Whether something is queued that somebody waits for."""

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
        """Writes a message if there is room for all of it, and nothing before it; returns whether it did."""

    @abstractmethod
    def flush(self) -> None:
        """Writes of what is queued as much as there is room for."""

    @abstractmethod
    def take_in(self, arrivals: Arrivals) -> bool:
        """Takes in the next message, or what there is of it; returns whether another may follow.

        Raises:
            ProtocolError: the peer wrote what cannot be a message.
        """

    @abstractmethod
    def has_written(self) -> bool:
        """Says whether the peer has written something that was not taken in. Needs no lock."""

    @abstractmethod
    def take(self, tag: Tag, out: torch.Tensor | None, note: str | None) -> Message | None:
        """Takes in the next message if it is like the last one with its tag; None, having done nothing, if not.

        Args:
            tag: of the message.
            out: where it is to go; None: in a new tensor.
            note: of the message; None: whatever it is.
        """

    @abstractmethod
    def abandon(self, context: int, error: EchelonError) -> None:
        """Ends the messages of a context's collectives that are queued; one that has begun goes on, but for nobody."""

    @abstractmethod
    def fail(self, error: EchelonError) -> None:
        """Ends everything that is under way."""


class Memory(Protocol):
    """Where lines write and a rank looks for it, while it polls."""

    @property
    def doorbell(self) -> int:
        """A file descriptor that can be read, anew, when something was written while this rank slept."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether something that is to be written has no room."""
        ...

    def has_news(self) -> bool:
        """Says whether something was written since `look`."""
        ...

    def look(self) -> bool:
        """Takes what is written by now for seen, before the lines take it in; returns what `has_news` would have."""
        ...

    def look_again(self) -> None:
        """Takes back `look`: not all was taken in."""
        ...

    def fall_asleep(self) -> bool:
        """Says to the peers that this rank sleeps; returns whether it may, because there is no news."""
        ...

    def wake_up(self) -> None:
        """Takes back `fall_asleep`."""
        ...
