"""Entrance of the messages of one peer: each is matched with its receive, within a limit on unclaimed memory."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from echelon.backends.delivery import IncomingMessage
from echelon.backends.formats import wire
from echelon.backends.formats.wire import Tag
from echelon.backends.matching import Mailbox
from echelon.backends.memory import dtype_of
from echelon.errors import ProtocolError

MAX_UNCLAIMED_BYTES = 1 << 30
"""Limit on the memory of one peer's unclaimed messages, beyond one message of any size."""
_LARGEST_KERNEL_BUFFER_BYTES = 64 << 20
"""More bytes than the kernels of two hosts buffer for one connection, unless they are configured for more."""
_SMALL_BYTES = 1 << 16
"""Unclaimed messages of more bytes get no buffer at first: see `Reader`."""

logger = logging.getLogger("echelon")


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


class Inbox:
    """Messages of one peer, on their way to the mailbox. Its links give them here, and stop at the limit.

    A message finds its receive, or is kept until one is posted. Kept messages take memory. At the limit no further one
    is taken in until some are claimed.
    """

    def __init__(self, rank: int, mailbox: Mailbox, max_unclaimed_bytes: int = MAX_UNCLAIMED_BYTES) -> None:
        """Takes the messages of `rank`."""
        self.rank = rank
        self.last: Head | None = None
        """Head of the peer's last collective message."""
        self.is_at_limit = False
        """Whether the next message must wait until others are claimed."""
        self.is_last = False
        """Whether the peer has announced its end: no more is coming, so the limit no longer counts."""
        self._mailbox = mailbox
        self._unclaimed_bytes = mailbox.unclaimed.num_bytes
        self.max_unclaimed_bytes = max_unclaimed_bytes

    def is_full(self, own_bytes: int = 0) -> bool:
        """Whether the peer's unclaimed messages exceed the limit; logs a warning when that begins.

        Args:
            own_bytes: size with which the next message is counted already.
        """
        unclaimed = self._unclaimed_bytes[self.rank]
        if unclaimed - own_bytes <= self.max_unclaimed_bytes or self.is_last:
            self.is_at_limit = False
            return False
        if not self.is_at_limit:
            self.is_at_limit = True
            logger.warning(
                "rank %d is paused, because %d bytes of its messages are unclaimed: "
                "receive its messages in the order they are sent, or raise max_unclaimed_bytes (%d)",
                self.rank,
                unclaimed,
                self.max_unclaimed_bytes,
            )
        return True

    def is_far_exceeded(self) -> bool:
        """Whether the peer's unclaimed messages exceed twice the limit, and more than kernels buffer."""
        unclaimed = self._unclaimed_bytes[self.rank]
        return unclaimed > 2 * self.max_unclaimed_bytes + _LARGEST_KERNEL_BUFFER_BYTES

    def take_small(self, head: Head, address: int) -> None:
        """Takes a message whose whole payload stands at `address`."""
        if head.is_signed:
            self.last = head
        self._mailbox.take_bytes(self.rank, head.tag, head.shape, head.dtype, head.note, address)

    def open(self, head: Head, *, comes_whole: bool) -> IncomingMessage:
        """Returns the incoming message that takes the payload. It may have no buffer yet.

        Args:
            head: of the message.
            comes_whole: see `IncomingMessage`.
        """
        if head.is_signed:
            self.last = head
        delivery = self._mailbox.arrive(self.rank, head.tag, head.shape, head.dtype, head.note, comes_whole)
        # `awaits`: a receive waits for a message behind this one, so this one may not stay where it is.
        if delivery.needs_buffer and (head.num_bytes <= _SMALL_BYTES or self._mailbox.awaits(self.rank)):
            self.give_buffer(delivery)
        return delivery

    def give_buffer(self, delivery: IncomingMessage) -> None:
        """Allocates a buffer for an unclaimed message, unless the limit is reached."""
        if not self.is_full(delivery.memory_bytes):
            delivery.place()
