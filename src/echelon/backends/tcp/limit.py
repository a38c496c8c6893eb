"""How much of a peer's messages is kept before anybody asks for them."""

from __future__ import annotations

import logging

from echelon.backends.matching import Mailbox

_LARGEST_KERNEL_BUFFER_BYTES = 64 << 20
"""More than the kernels of two hosts hold of a connection, unless they are set up for more."""

logger = logging.getLogger("echelon")


class Limit:
    """The most that one peer's unclaimed messages may take, beyond one message of any size."""

    def __init__(self, mailbox: Mailbox, max_bytes: int) -> None:
        """Nobody has reached it yet."""
        self._mailbox = mailbox
        self._max_bytes = max_bytes
        self.reached_by: set[int] = set()
        """Ranks whose next message must wait until others are claimed."""

    def keeps_out(self, rank: int, own_bytes: int = 0) -> bool:
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
