"""Comparison of calls at close: each rank sends its counts of calls to its peers right before its CLOSE frame.

A rank that closes its group sends each peer two counts, in TALLY frames. The first is the last collective of each group
that both are in; the second is the number of messages of that peer that it has received. A rank that closes later
compares them with its own. So a call too many is detected even if it was the very last and no rank waited for it.

The frame of a group also has the lines of its last calls. So a rank that still waits can say where the lines part.

No rank waits for these frames. A rank that closes first sends them and detects nothing: no peer has sent any to it.
After a failure, a withdrawn receive or a call of `keep_silent` a rank sends nothing and compares nothing, because then
ranks may end with different calls in good order.

Called with the lock of `Progress` held.
"""

from __future__ import annotations

import ctypes
import string
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from echelon.backends.formats import wire
from echelon.backends.matching import Mailbox
from echelon.call_site import line_of
from echelon.errors import CollectiveMismatch, ProtocolError
from echelon.operation_records import FlightRecorder, OperationRecord
from echelon.purposes import SAME_ARGUMENTS, cure_of
from echelon.wording import counted

MAX_TALLIES = 256
"""Most frames that a rank sends to each peer, one of them for messages. Of more groups, the newest are compared."""
_GROUPS_WITH_LINES = 8
"""Most groups, the newest, of which a rank tells the lines of its calls."""
_NAMES = string.ascii_letters + string.digits
"""One-letter names of different lines."""


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
        self._lines_left: dict[tuple[int, int], Mapping[int, str]] = {}
        """By peer and context."""
        self._packed: dict[int, str] = {}
        """Notes with lines, by context, the same for each peer."""
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
        with_lines = shared[-_GROUPS_WITH_LINES:]
        for context in shared[-(MAX_TALLIES - 1) :]:
            if (last := self._recorder.latest(context)) is not None:
                note = self._with_lines(last) if context in with_lines else last.with_marks()
                yield wire.Frame(kind, context, last.sequence, last.signature, note=note)

    def _with_lines(self, last: OperationRecord) -> str:
        found = self._packed.get(last.context)
        if found is None:
            found = self._packed[last.context] = _pack(last.with_marks(), self._recorder.last_calls(last.context))
        return found

    def lines_left(self, peer: int, context: int) -> Mapping[int, str]:
        """Returns the lines of the last calls of a peer that has closed, by the number of the call."""
        return self._lines_left.get((peer, context), {})

    def hear(self, peer: int, tally: wire.Frame) -> None:
        """Stores one TALLY frame of a peer.

        Raises:
            ProtocolError: the peer has sent more than `MAX_TALLIES`.
        """
        tallies = self._tallies.setdefault(peer, [])
        if len(tallies) == MAX_TALLIES:
            raise ProtocolError(f"more than {MAX_TALLIES} TALLY frames: the peer does not speak this protocol")
        note, lines = _unpack(tally)
        tallies.append(tally._replace(note=note))
        if lines:
            self._lines_left[peer, tally.context] = lines

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
        advice = cure_of({self._rank: here, peer: tally.note}, have_ended=True) or SAME_ARGUMENTS
        return CollectiveMismatch(
            f"rank {self._rank} closes its group after {here}, {number} in all, but rank {peer} closed it after "
            f"{tally.note}, {tally.sequence} in all: {advice}",
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


def _pack(text: str, calls: Sequence[OperationRecord]) -> str:
    """Returns a text, a letter for each call from the last one backwards, and the lines that the letters stand for."""
    lines: dict[str, str] = {}
    letters = ""
    room = wire.MAX_NOTE_BYTES - len(text.encode(errors="backslashreplace")) - 1
    for call in calls:
        line = line_of(call.place) + call.called_from()
        is_next = call.sequence == calls[0].sequence - len(letters)
        # A letter. A new line also takes its text, and the line break before it.
        needed = 1 if line in lines else 2 + len(line.encode(errors="backslashreplace"))
        if (
            not is_next
            or not line
            or "\n" in line
            or needed > room
            or (line not in lines and len(lines) == len(_NAMES))
        ):
            break
        room -= needed
        letters += lines.setdefault(line, _NAMES[len(lines)])
    return "\n".join([text, letters, *lines]) if letters else text


def _unpack(tally: wire.Frame) -> tuple[str, dict[int, str]]:
    """Returns the text of a frame, and the lines of the calls by their numbers."""
    # A note without lines has no letters either.
    text, letters, *lines = [*tally.note.split("\n"), ""]
    named = dict(zip(_NAMES, lines, strict=False))
    return text, {tally.sequence - back: named[letter] for back, letter in enumerate(letters) if letter in named}
