"""Link between two ranks that share memory."""

from __future__ import annotations

import torch

from echelon.backends.delivery import IncomingMessage
from echelon.backends.formats.wire import Tag
from echelon.backends.shared.messages.message_region import MessageRegion
from echelon.backends.shared.messages.receiver import RingReceiver
from echelon.backends.shared.messages.sender import RingSender
from echelon.backends.tcp.link import Arrivals, Link
from echelon.backends.work import Message, Work
from echelon.errors import EchelonError


class SharedLine(Link):
    """Sender and receiver of one rank towards one peer, over two rings."""

    def __init__(self, at: MessageRegion, peer: int, max_message_bytes: int) -> None:
        """Creates both ends of this rank.

        Args:
            at: the region with the rings.
            peer: the other rank's number on this host.
            max_message_bytes: limit of the peer's messages; a longer one is a ProtocolError.
        """
        self._outlet = RingSender(at, peer)
        self._inlet = RingReceiver(at, peer, max_message_bytes)

    @property
    def delivery(self) -> IncomingMessage | None:  # noqa: D102
        return self._inlet.delivery

    @property
    def wants_to_write(self) -> bool:  # noqa: D102
        return bool(self._outlet.queue)

    @property
    def owes(self) -> bool:  # noqa: D102
        return self._outlet.owes

    def send(self, head: bytes, tensor: torch.Tensor, tag: Tag, work: Work[None]) -> None:  # noqa: D102
        self._outlet.send(head, tensor, tag, work)

    def put(self, head: bytes, tensor: torch.Tensor) -> bool:  # noqa: D102
        return self._outlet.put(head, tensor)

    def flush(self) -> None:  # noqa: D102
        self._outlet.flush()

    def take_in(self, arrivals: Arrivals) -> bool:  # noqa: D102
        return self._inlet.take_in(arrivals)

    def has_written(self) -> bool:  # noqa: D102
        return self._inlet.has_record()

    def take(self, tag: Tag, out: torch.Tensor | None, note: str | None) -> Message | None:  # noqa: D102
        return self._inlet.take(tag, out, note)

    def abandon(self, context: int, error: EchelonError) -> None:  # noqa: D102
        self._outlet.abandon(context, error)

    def fail(self, error: EchelonError) -> None:  # noqa: D102
        self._outlet.fail(error)
        self._inlet.fail(error)
