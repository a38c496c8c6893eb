"""Groups and messages of roles: which recorded ranks meet in a collective, and who answers a message. Pure.

A role represents all ranks of its class. Two roles meet in a group that has members of both classes. The group that a
role was recorded with need not have the other role's own rank: then the other role has a group of the same composition,
and these two count as one. A message to a rank that is not recorded is answered by the role of its class. That role may
exchange its messages with a third one, as where a stage differs from its counterparts in a single pipeline. Then the
message follows them: it waits for the other side, which does not wait for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from echelon.errors import DeadlockError
from echelon.foresight.trace import Collective, Communication, Message, Trace

Composition = tuple[tuple[int, int], ...]


class Meeting(NamedTuple):
    """Group in which several roles meet."""

    composition: Composition
    name: str
    occurrence: int
    """Number among the role's groups of this composition and name."""


class Channel(NamedTuple):
    """Route of messages from one rank to another, or from one class to another."""

    src: int
    dst: int
    is_class: bool
    tag: int


class Encounter(NamedTuple):
    """A call of communication in which several roles meet, as one of them sees it."""

    key: tuple[Meeting | Channel, int]
    """The same for all members: where they meet, and how often they have met there."""
    members: frozenset[int]
    member: int
    """The member that calls."""


class Counterparts:
    """Counterparts of each role."""

    def __init__(self, traces: Mapping[int, Trace], classes: Mapping[int, int] | Sequence[int]) -> None:
        self._classes = classes
        self._traces = traces
        self._compositions: dict[tuple[int, ...], Composition] = {}
        found: dict[int, dict[int, Meeting]] = {}
        holders: dict[Meeting, set[int]] = defaultdict(set)
        for role, trace in traces.items():
            counts: Counter[tuple[Composition, str]] = Counter()
            found[role] = {}
            for index, group in enumerate(trace.groups):
                composition = self._composition(group.ranks)
                # Ranks of one class do the same at the same time, so nobody waits in such a group.
                if len(composition) > 1:
                    key = composition, group.name
                    found[role][index] = meeting = Meeting(*key, counts[key])
                    counts[key] += 1
                    holders[meeting].add(role)
        # A group with which the role of some class was not recorded is played by its formula alone.
        self._meetings = {
            role: {
                index: meeting
                for index, meeting in meetings.items()
                if holders[meeting] == {each for each, _ in meeting.composition}
            }
            for role, meetings in found.items()
        }
        self._answered = self._matching_channels()
        self._calls: Counter[tuple[int, Meeting | Channel, int]] = Counter()

    def encounter(self, role: int, entry: Communication) -> Encounter | None:
        """Counts a role's communication: to be called once for each entry, in order. None if the role meets nobody."""
        where: Meeting | Channel | None
        if isinstance(entry, Collective):
            where = self.meeting(role, entry.group)
            if where is None:
                return None
            members, member = frozenset(each for each, _ in where.composition), role
        else:
            where = self.channel(role, entry)
            if where is None:
                return None
            # A class's role sends to itself where ranks of one class send to each other: its sides are two members.
            members, member = frozenset((0, 1)), int(entry.is_send)
        side = role, where, member
        count = self._calls[side]
        self._calls[side] += 1
        return Encounter((where, count), members, member)

    def _composition(self, ranks: tuple[int, ...]) -> Composition:
        # A group of all ranks is in every trace, and takes long to count.
        known = self._compositions.get(ranks)
        if known is None:
            known = tuple(sorted(Counter([self._classes[rank] for rank in ranks]).items()))
            self._compositions[ranks] = known
        return known

    def meeting(self, role: int, group: int) -> Meeting | None:
        """Returns the meeting of a role's group. None if the role alone represents all members."""
        return self._meetings[role].get(group)

    def channel(self, role: int, message: Message) -> Channel | None:
        """Returns the channel of a role's message. None if no recorded role answers it."""
        channel = self.channel_of(role, message)
        return channel if channel in self._answered else None

    def followed(self, role: int, message: Message) -> Channel | None:
        """Returns the channel of the peer's role that a message without an answer follows. None if there is none."""
        if message.peer < 0:
            return None
        group = self._traces[role].groups[message.group]
        peer = self._classes[message.peer]
        mine, theirs = group.ranks.index(role), group.ranks.index(message.peer)
        for index, other in enumerate(self._traces[peer].groups):
            # The role of the peer was recorded in another part of the grid, with its members in the same places.
            is_like = (other.name, other.number, len(other.ranks)) == (group.name, group.number, len(group.ranks))
            if is_like and other.ranks[theirs] == peer:
                answer = message._replace(is_send=not message.is_send, peer=other.ranks[mine], group=index)
                return self.channel_of(peer, answer)
        return None

    def channel_of(self, role: int, message: Message) -> Channel:
        """Returns the channel of a role's message, answered or not."""
        is_class = message.peer not in self._traces
        peer = self._classes[message.peer] if is_class else message.peer
        src, dst = (role, peer) if message.is_send else (peer, role)
        return Channel(src, dst, is_class, message.tag)

    def _matching_channels(self) -> set[Channel]:
        """Returns channels between recorded ranks, and channels between classes with as many receives as sends."""
        sends: Counter[Channel] = Counter()
        receives: Counter[Channel] = Counter()
        for role, trace in self._traces.items():
            for entry in trace.entries:
                if type(entry) is Message:
                    (sends if entry.is_send else receives)[self.channel_of(role, entry)] += 1
        return {each for each in sends.keys() | receives.keys() if not each.is_class or sends[each] == receives[each]}


def waiting_text(rank: int, trace: Trace, index: int, missing: Iterable[int]) -> str:
    """Returns the text for a communication that waits for members."""
    entry = trace.communication(index)
    place = trace.line(entry)
    if isinstance(entry, Message):
        way = "send to" if entry.is_send else "receive from"
        return f"rank {rank} at {place} in {way} rank {entry.peer}"
    group = trace.groups[entry.group]
    name = f" of group {group.name}" if group.name else ""
    others = ", ".join(f"rank {each}" for each in sorted(missing))
    return f"rank {rank} at {place} in {entry.kind}{name} for {others}"


def deadlock(waiting: Iterable[str]) -> DeadlockError:
    """Returns the error for communication that waits for ever, with the texts of `waiting_text`."""
    return DeadlockError("these wait for each other for ever: " + "; ".join(sorted(set(waiting))))
