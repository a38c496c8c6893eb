"""The lines of one rank: how messages from and to the ranks that share memory with it are taken in and written.

Called with the lock of `Progress` held; nothing here waits. What is taken in at a time has an end, so a peer that sends
as fast as this rank reads keeps no other thread from the lock, and no other peer from being heard.
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

# How much of a peer's messages is kept before anybody asks for them.

_LARGEST_KERNEL_BUFFER_BYTES = 64 << 20
"""More than the kernels of two hosts hold of a connection, unless they are set up for more."""

logger = logging.getLogger("echelon")


class UnclaimedLimit:
    """The most that one peer's unclaimed messages may take, beyond one message of any size."""

    def __init__(self, mailbox: Mailbox, max_bytes: int) -> None:
        """Nobody has reached it yet."""
        self._mailbox = mailbox
        self._max_bytes = max_bytes
        self.reached_by: set[int] = set()
        """Ranks whose next message must wait until others are claimed."""

    def exceeded_by(self, rank: int, own_bytes: int = 0) -> bool:
        """Says whether there is no memory for a rank's next message, and warns when that begins.

        Args:
            rank: the sender.
            own_bytes: what the message is counted with already.
        """
        unclaimed = self._mailbox.unclaimed_bytes(rank)
        if unclaimed - own_bytes <= self._max_bytes:
            if self.reached_by:
                self.reached_by.discard(rank)
            return False
        if rank not in self.reached_by:
            self.reached_by.add(rank)
            logger.warning(
                "rank %d has sent %d bytes that nobody here has received: nothing more is read from it until some are; "
                "receive its messages in the order they are sent, or raise max_unclaimed_bytes (%d)",
                rank,
                unclaimed,
                self._max_bytes,
            )
        return True

    def is_far_exceeded(self, rank: int) -> bool:
        """Whether a rank's unclaimed messages take twice what they may: so much is in no kernel's buffer."""
        return self._mailbox.unclaimed_bytes(rank) > 2 * self._max_bytes + _LARGEST_KERNEL_BUFFER_BYTES


_MOST_AT_END = 1 << 15
"""How many messages, or parts, are taken in of a peer that has told its end. A ring has room for 8192 of the smallest
messages, and nothing is written to it later."""
_MOST_AT_ONCE = 64
"""How many messages of one peer, or parts of a large one, are taken in before others are looked at."""


class LinkTable:
    """Of one rank, by peer; none before `use`."""

    def __init__(
        self, arrivals: Mapping[int, Arrivals], limit: UnclaimedLimit, on_failure: Callable[[int, PeerFailed], None]
    ) -> None:
        """Has no lines yet.

        Args:
            arrivals: what becomes of each rank's messages.
            limit: on those that nobody asks for.
            on_failure: called when a peer wrote what cannot be a message, or reads what it cannot have.
        """
        self._arrivals = arrivals
        self._limit = limit
        self._on_failure = on_failure
        self._lines: dict[int, Link] = {}
        self._memory: Memory | None = None

    def use(self, lines: Mapping[int, Link], memory: Memory) -> None:
        """Has messages to and from these ranks take lines from now on, which write to this memory."""
        self._lines.update(lines)
        self._memory = memory

    def all(self) -> list[Link]:
        """Returns every line."""
        return list(self._lines.values())

    def owing(self) -> list[int]:
        """Returns the ranks whose lines have no room for all that is to be sent to them."""
        return [rank for rank, line in self._lines.items() if line.owes]

    def clear(self) -> None:
        """Forgets all."""
        self._lines.clear()

    def of(self, rank: int) -> Link | None:
        """Returns the line to a rank, if there is one."""
        return self._lines.get(rank)

    def send(self, rank: int, head: bytes, tensor: torch.Tensor, tag: Tag, work: Work[None]) -> bool:
        """Writes or queues a message, see `Line.send`; returns False if there is no line to that rank."""
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
        """Takes in what has been written, and writes what there is room for now."""
        for rank, line in list(self._lines.items()):
            self._go_on(rank, line)

    def on_post(self, receive: Receive) -> bool:
        """Takes in what was put off, as far as it concerns a receive that was posted; returns whether there was any."""
        found = False
        for rank in (receive.src, *receive.sources) if receive.sources else (receive.src,):
            line = self._lines.get(rank)
            if line is not None and (line.delivery is not None or rank in self._limit.reached_by):
                self._go_on(rank, line)
                found = True
        return found

    def take_in_last(self, rank: int) -> None:
        """Takes in all that a rank has written before it told its end. There is no more to come, so no limit counts."""
        line = self._lines.get(rank)
        if line is not None:
            self._finish(rank, line)

    def end(self, rank: int) -> Link | None:
        """Takes in the last of a rank, and returns its line, which is used no more; None if it has none."""
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
                f"rank {rank} goes on writing after it has told its end, {_MOST_AT_END} messages so far"
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
        else:
            assert self._memory is not None
            self._memory.look_again()

    def _is_held(self, rank: int, line: Link) -> bool:
        """Says whether nothing is taken in for the time being; finds a place for a message that needs one."""
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
