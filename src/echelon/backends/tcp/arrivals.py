"""What becomes of the messages of one rank: each finds its receive, or is kept until one is posted for it."""

from __future__ import annotations

from echelon.backends.delivery import Delivery
from echelon.backends.matching import Mailbox
from echelon.backends.tcp.line import Arrivals, Head


class MailboxArrivals(Arrivals):
    """Has the messages of one rank find their receives."""

    def __init__(self, rank: int, mailbox: Mailbox, last_notes: dict[int, str]) -> None:
        """Hands the messages of `rank` to a mailbox, and writes down the note of its last collective."""
        self._rank = rank
        self._mailbox = mailbox
        self._last_notes = last_notes

    def take_small(self, head: Head, address: int) -> None:  # noqa: D102
        if head.is_signed:
            self._last_notes[self._rank] = head.note
        self._mailbox.take_bytes(self._rank, head.tag, head.shape, head.dtype, head.note, address)

    def open(self, head: Head, *, comes_whole: bool) -> Delivery:  # noqa: D102
        if head.is_signed:
            self._last_notes[self._rank] = head.note
        return self._mailbox.arrive(self._rank, head.tag, head.shape, head.dtype, head.note, comes_whole)
