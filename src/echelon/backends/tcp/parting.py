"""Comparison of calls at close: each rank sends its counts of calls to its peers right before its CLOSE frame.

A rank that closes its group sends each peer two counts, in TALLY frames. The first is the last collective of each group
that both are in; the second is the number of messages of that peer that it has received. A rank that closes later
compares them with its own. So a call too many is detected even if it was the very last and no rank waited for it.

No rank waits for these frames. A rank that closes first sends them and detects nothing: no peer has sent any to it.
After a failure, a withdrawn receive or a call of `keep_silent` a rank sends nothing and compares nothing, because then
ranks may end with different calls in good order.

Called with the lock of `Progress` held.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator, Sequence

from echelon.backends.formats import wire
from echelon.backends.matching import Mailbox
from echelon.errors import CollectiveMismatch, ProtocolError
from echelon.operation_records import FlightRecorder
from echelon.wording import counted

MAX_TALLIES = 256
"""Most frames that a rank sends to each peer, one of them for messages. Of more groups, the newest are compared."""
_ADVICE = "every rank must call the same operations in the same order with the same arguments"


class Parting:
    """Counts of calls of one rank and of its peers, compared when it closes."""

    def __init__(self, rank: int, recorder: FlightRecorder, mailbox: Mailbox) -> None:
        """Starts with no group.

        Args:
            rank: this rank.
            recorder: records its collectives.
            mailbox: counts its received messages.
        """
        self.sent: defaultdict[int, ctypes.c_uint64] = defaultdict(ctypes.c_uint64)
        """Number of messages sent to each rank, without the messages of collectives. The native library counts, too."""
        self._rank = rank
        self._recorder = recorder
        self._mailbox = mailbox
        self._groups: dict[int, tuple[int, ...]] = {}
        self._tallies: dict[int, list[wire.Frame]] = {}
        self._keeps_silent = False

    def num_sent(self, rank: int) -> int:
        """Returns the number of messages sent to a rank, without the messages of collectives."""
        # Not by [], which would keep an entry for every number that a peer makes up.
        sent = self.sent.get(rank)
        return 0 if sent is None else sent.value

    def join(self, context: int, ranks: Sequence[int]) -> None:
        """Adds a group of these ranks, this one included."""
        self._groups.pop(context, None)  # a group that joins again counts as the newest
        self._groups[context] = tuple(ranks)

    def keep_silent(self) -> None:
        """Tells and compares nothing from now on."""
        self._keeps_silent = True

    def words_for(self, peer: int) -> Iterator[wire.Frame]:
        """Yields the TALLY frames for a peer, to be sent right before the CLOSE frame of this rank."""
        if self._is_silent():
            return
        kind = wire.FrameKind.TALLY
        if not self._mailbox.awaits(peer):  # else one may be on its way that this rank would have received
            yield wire.Frame(kind, sequence=self._mailbox.claimed[peer].value)
        shared = [context for context, ranks in self._groups.items() if peer in ranks]
        for context in shared[-(MAX_TALLIES - 1) :]:
            if (last := self._recorder.latest(context)) is not None:
                yield wire.Frame(kind, context, last.sequence, last.signature, note=last.with_marks())

    def hear(self, peer: int, tally: wire.Frame) -> None:
        """Stores one TALLY frame of a peer.

        Raises:
            ProtocolError: the peer has sent more than `MAX_TALLIES`.
        """
        tallies = self._tallies.setdefault(peer, [])
        if len(tallies) == MAX_TALLIES:
            raise ProtocolError(f"more than {MAX_TALLIES} TALLY frames: the peer does not speak this protocol")
        tallies.append(tally)

    def difference(self) -> CollectiveMismatch | None:
        """Returns the first difference between the calls of this rank and of its peers. None if there is none."""
        if self._is_silent():
            return None
        for peer, tallies in sorted(self._tallies.items()):
            for tally in tallies:
                if error := self._messages(peer, tally) if tally.context == 0 else self._collectives(peer, tally):
                    return error
        return self._unread()

    def _is_silent(self) -> bool:
        return self._keeps_silent or self._mailbox.failures.has_any

    def _collectives(self, peer: int, tally: wire.Frame) -> CollectiveMismatch | None:
        if peer not in self._groups.get(tally.context, ()):
            return None
        mine = self._recorder.latest(tally.context)
        number = 0 if mine is None else mine.sequence
        if number == tally.sequence and (mine is None or mine.signature == tally.step):
            return None
        here = "no collective of it" if mine is None else mine.with_marks()
        return CollectiveMismatch(
            f"rank {self._rank} closes its group after {here}, {number} in all, but rank {peer} closed it after "
            f"{tally.note}, {tally.sequence} in all: {_ADVICE}",
            peer,
            tally.note,
        )

    def _messages(self, peer: int, tally: wire.Frame) -> CollectiveMismatch | None:
        sent = self.sent[peer].value
        if sent <= tally.sequence:
            return None
        return CollectiveMismatch(
            f"rank {self._rank} has sent {counted(sent, 'message')} to rank {peer}, which closed its group after it "
            f"had received {tally.sequence}: receive them all there, or send fewer",
            peer,
        )

    def _unread(self) -> CollectiveMismatch | None:
        for src, tag in sorted(self._mailbox.unclaimed):
            if tag.sequence == 0 and tag.context in self._groups:
                return CollectiveMismatch(
                    f"rank {self._rank} closes its group without having received a message from rank {src}, "
                    f"tag {tag.step}: receive it here, or do not send it there",
                    src,
                )
        return None
