"""The links of one rank, and the limit on memory for messages that nobody has asked for.

Called with the lock of `Progress` held; nothing here blocks. The number of messages per turn is limited. So a peer that
sends as fast as this rank reads keeps no other thread from the lock, and no other peer from its turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from echelon.backends.delivery import Receive
from echelon.backends.formats.wire import Tag
from echelon.backends.matching import Mailbox
from echelon.backends.tcp.link import Arrivals, Link, Memory
from echelon.backends.work import Work
from echelon.errors import EchelonError, PeerFailed, ProtocolError

_LARGEST_KERNEL_BUFFER_BYTES = 64 << 20
"""More bytes than the kernels of two hosts buffer for one connection, unless they are configured for more."""

logger = logging.getLogger("echelon")


class UnclaimedLimit:
    """Limit on the memory of one peer's unclaimed messages, beyond one message of any size."""

    def __init__(self, mailbox: Mailbox, max_bytes: int) -> None:
        """Starts with no rank at the limit."""
        self._mailbox = mailbox
        self._max_bytes = max_bytes
        self.reached_by: set[int] = set()
        """Ranks whose next message must wait until others are claimed."""

    def exceeded_by(self, rank: int, own_bytes: int = 0) -> bool:
        """Whether a rank's unclaimed messages exceed the limit; logs a warning when that begins.

        Args:
            rank: the sender.
            own_bytes: size with which the next message is counted already.
        """
        unclaimed = self._mailbox.unclaimed_bytes(rank)
        if unclaimed - own_bytes <= self._max_bytes:
            if self.reached_by:
                self.reached_by.discard(rank)
            return False
        if rank not in self.reached_by:
            self.reached_by.add(rank)
            logger.warning(
                "rank %d is paused, because %d bytes of its messages are unclaimed: "
                "receive its messages in the order they are sent, or raise max_unclaimed_bytes (%d)",
                rank,
                unclaimed,
                self._max_bytes,
            )
        return True

    def is_far_exceeded(self, rank: int) -> bool:
        """Whether a rank's unclaimed messages exceed twice the limit, and more than kernels buffer."""
        return self._mailbox.unclaimed_bytes(rank) > 2 * self._max_bytes + _LARGEST_KERNEL_BUFFER_BYTES


_MOST_AT_END = 1 << 15
"""Messages, or parts of them, that are read at most from a peer that has announced its end. A ring has room for 8192 of
the smallest messages, and the peer writes no more."""
_MOST_AT_ONCE = 64
"""Messages of one peer, or parts of a large one, that are read before the other peers get their turn."""


class LinkTable:
    """The links of one rank, by peer. Empty before `use`."""

    def __init__(
        self, arrivals: Mapping[int, Arrivals], limit: UnclaimedLimit, on_failure: Callable[[int, PeerFailed], None]
    ) -> None:
        """Starts without links.

        Args:
            arrivals: takes the messages, by rank of their sender.
            limit: on unclaimed messages.
            on_failure: called with a peer that broke the protocol of a link.
        """
        self._arrivals = arrivals
        self._limit = limit
        self._on_failure = on_failure
        self._lines: dict[int, Link] = {}
        self._memory: Memory | None = None

    def use(self, lines: Mapping[int, Link], memory: Memory) -> None:
        """Routes messages to and from these ranks over links from now on; the links write to `memory`."""
        self._lines.update(lines)
        self._memory = memory

    def all(self) -> list[Link]:
        """Returns every link."""
        return list(self._lines.values())

    def owing(self) -> list[int]:
        """Returns the ranks with messages that are still queued for their link."""
        return [rank for rank, line in self._lines.items() if line.owes]

    def clear(self) -> None:
        """Removes all links."""
        self._lines.clear()

    def of(self, rank: int) -> Link | None:
        """Returns the link to a rank. None if there is none."""
        return self._lines.get(rank)

    def send(self, rank: int, head: bytes, tensor: torch.Tensor, tag: Tag, work: Work[None]) -> bool:
        """Writes or queues a message, see `Link.send`. False if there is no link to the rank."""
        line = self._lines.get(rank)
        if line is None:
            return False
        try:
            line.send(head, tensor, tag, work)
        except EchelonError as error:
            self._on_failure(rank, PeerFailed(rank, str(error)))
        return True

    # Taking in

    def take_in(self) -> None:
        """Takes in new messages of all peers, and writes queued messages as far as there is room."""
        # A copy: a link that fails is removed while the loop runs.
        for rank, line in list(self._lines.items()):
            self._go_on(rank, line)

    def on_post(self, receive: Receive) -> bool:
        """Resumes reading the paused peers that a new receive may match. True if one was read."""
        found = False
        for rank in (receive.src, *receive.sources) if receive.sources else (receive.src,):
            line = self._lines.get(rank)
            if line is not None and (line.delivery is not None or rank in self._limit.reached_by):
                self._go_on(rank, line)
                found = True
        return found

    def take_in_last(self, rank: int) -> None:
        """Drains the link of a rank that has announced its end, ignoring the unclaimed limit: no more is coming."""
        line = self._lines.get(rank)
        if line is not None:
            self._finish(rank, line)

    def end(self, rank: int) -> Link | None:
        """Drains and removes the link of a rank, and returns it. None if there is none."""
        line = self._lines.pop(rank, None)
        if line is not None:
            self._finish(rank, line)
        return line

    def _finish(self, rank: int, line: Link) -> None:
        try:
            for _ in range(_MOST_AT_END):
                if (delivery := line.delivery) is not None and not delivery.comes_whole:
                    delivery.place()
                if not line.take_in(self._arrivals[rank]):
                    return
            raise ProtocolError(
                f"{_MOST_AT_END} messages came after its CLOSE frame: the peer does not speak this protocol"
            )
        except EchelonError as error:
            self._on_failure(rank, PeerFailed(rank, str(error)))

    def _go_on(self, rank: int, line: Link) -> None:
        try:
            if line.wants_to_write:
                line.flush()
            for _ in range(_MOST_AT_ONCE):
                if self._is_held(rank, line) or not line.take_in(self._arrivals[rank]):
                    return
        except EchelonError as error:
            self._on_failure(rank, PeerFailed(rank, str(error)))
        else:  # the turn was used up: the peer may have written more, so the poller must come back
            assert self._memory is not None
            self._memory.look_again()

    def _is_held(self, rank: int, line: Link) -> bool:
        """Whether reading from a rank is paused by the limit. Allocates a buffer for the next message if not."""
        delivery = line.delivery
        if delivery is None:
            return self._limit.exceeded_by(rank)
        if delivery.is_placed:
            return False
        if self._limit.exceeded_by(rank, delivery.memory_bytes):
            return True
        if not delivery.comes_whole:
            delivery.place()
        return False
