"""Choice of the ranks that are recorded, one for each role, and of the role that represents each rank. Pure.

A rank is a point in the grid that the groups of recorded ranks span, such as data parallel x tensor parallel. The hosts
are an axis, too, if the first rank of a host differs from the last one of another. Along each axis both ends are
recorded, and a point between them if both are even or both are odd. If they do the same, all points between them are
assumed to do the same; if not, the axis is divided: next to its first point, next to its last one, then in the middle,
and so on. This divides the grid into boxes, each with the role of its corner.

The last rank and random ones are recorded to confirm this: one in each box, but only one for all boxes in the middle of
an axis, such as the stages of a pipeline between the first and the last one. Where such a rank differs from its corner,
its box alone is divided in the same way.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from operator import attrgetter
from typing import NamedTuple

from echelon.foresight.trace import Allocate, Collective, Entry, Free, Group, Kernel, Message, Trace

_FEW_ENTRIES = 20_000
_FEW_RANKS = 16
"""Ranks, and entries of all of them, up to which every rank is recorded: this takes a few seconds."""
_MOST_POINTS = 1024
"""Most parts into which a box is divided."""


class Axis(NamedTuple):
    """Axis of the grid of ranks."""

    size: int
    stride: int


def axes_of(trace: Trace, ranks_of_host: int = 0) -> tuple[Axis, ...]:
    """Returns the axes of the grid that a rank's groups span, from the outermost to the innermost.

    Groups whose ranks have equal distances are axes. Further axes fill the gaps, so that all ranks are points. An axis
    that goes through hosts of equal size has a part inside of them, since a program may ask for LOCAL_RANK.
    """
    found: set[Axis] = set()
    for group in trace.groups:
        ranks = group.ranks
        steps = {after - before for before, after in pairwise(ranks)}
        if len(steps) == 1 and 1 < len(ranks) < trace.world_size and min(steps) > 0:
            found.add(Axis(len(ranks), steps.pop()))
    axes: list[Axis] = []
    reach = 1
    # From the innermost on. An axis that combines others, as of a flattened mesh, is left out.
    for axis in sorted(found, key=lambda each: (each.stride, each.size)):
        if axis.stride < reach or axis.stride % reach or trace.world_size % (axis.stride * axis.size):
            continue
        if axis.stride > reach:
            axes.append(Axis(axis.stride // reach, reach))
        axes.append(axis)
        reach = axis.stride * axis.size
    if reach < trace.world_size:
        axes.append(Axis(trace.world_size // reach, reach))
    for number, (size, stride) in enumerate(axes):
        inside, rest = divmod(ranks_of_host, stride)
        if 1 < inside < size and not rest and not size % inside:
            axes[number : number + 1] = Axis(inside, stride), Axis(size // inside, ranks_of_host)
            break
    return tuple(reversed(axes))


class Box(NamedTuple):
    """Part of the grid: a range of coordinates along each axis."""

    ranges: tuple[range, ...]

    @property
    def corner(self) -> tuple[int, ...]:
        """First point."""
        return tuple(each.start for each in self.ranges)


@dataclass
class Roles:
    """Recorded ranks so far, and the choice of the next ones."""

    world_size: int
    seed: int = 0
    ranks_of_host: int = 0
    """Number of ranks on each host. 0 if the hosts have different ones."""
    traces: dict[int, Trace] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    classes: tuple[int, ...] = ()
    """Role of each rank: the recorded rank that represents it. Empty until all roles are known."""
    _axes: tuple[Axis, ...] | None = None
    _random: set[int] = field(default_factory=set)
    """Ranks that were chosen at random."""

    def add(self, traces: Mapping[int, Trace]) -> None:
        """Adds recorded ranks."""
        for rank, trace in traces.items():
            if rank not in self.traces:
                self.traces[rank] = trace
                self.digests[rank] = digest(trace)

    def next_ranks(self) -> list[int]:
        """Returns the ranks to record next. Empty if all roles are known."""
        if not self.traces:
            return [0]
        num_entries = sum(len(trace.entries) for trace in self.traces.values()) / len(self.traces)
        if self.world_size <= _FEW_RANKS and num_entries * self.world_size <= _FEW_ENTRIES:
            left = sorted(self._unrecorded(range(self.world_size)))
            if not left:
                self._fold(range(self.world_size))
            return left
        if self._axes is None:
            if missing := self._choose_axes():
                return sorted(missing | self._drawn(range(self.world_size), missing))
            assert self._axes is not None
        grid = Box(tuple(range(axis.size) for axis in self._axes))
        boxes, missing = self._divided(grid)
        if missing:
            # With the last rank, which may have fewer samples, and a random one: a further round for them takes longer.
            missing |= self._unrecorded([self.world_size - 1])
            return sorted(missing | (set() if self._random else self._drawn(range(self.world_size), missing)))
        leaves = [leaf for box in boxes for leaf in self._leaves(box, missing)]
        if missing:
            return sorted(missing)
        roles = [0] * self.world_size
        for leaf in leaves:
            for rank in self._ranks(leaf):
                roles[rank] = self._speaker(leaf)
        self._fold(roles)
        return sorted(self._unanswered(roles)) or sorted(self._confirmation(boxes))

    # Boxes

    def _choose_axes(self) -> set[int]:
        """Chooses the axes of the grid, or returns the ranks that have to be recorded first."""
        first = self.traces[0]
        self._axes, divided = axes_of(first), axes_of(first, self.ranks_of_host)
        if divided == self._axes:
            return set()
        size, stride = next(one for one, other in zip(self._axes, divided, strict=False) if one != other)
        # A program that asks for LOCAL_RANK mostly does something else on the first rank of each host.
        others = self.ranks_of_host, (size - 1) * stride
        missing = self._unrecorded([*others, self.world_size - 1])
        if missing:
            self._axes = None
        elif self.digests[others[0]] != self.digests[others[1]]:
            self._axes = divided
        return missing

    def _divided(self, box: Box, cut: tuple[int, int] | None = None) -> tuple[list[Box], set[int]]:
        """Divides a box by its axes. Returns its parts, or the ranks that have to be recorded first.

        Args:
            box: the part of the grid.
            cut: number of an axis, and a coordinate that becomes a range of its own.
        """
        missing: set[int] = set()
        divisions = []
        for number in range(len(box.ranges)):
            cuts = {cut[1], cut[1] + 1} if cut is not None and cut[0] == number else set()
            division, unknown = self._division(box, number, cuts & set(box.ranges[number]))
            divisions.append(division)
            missing.update(unknown)
        if missing:
            return [], missing
        if math.prod(map(len, divisions)) > _MOST_POINTS:
            return [box], set()
        parts = [Box(ranges) for ranges in product(*divisions)]
        return parts, self._unrecorded(map(self._speaker, parts))

    def _division(self, box: Box, number: int, cuts: set[int]) -> tuple[list[range], set[int]]:
        """Returns the parts of a box's range along one axis, or the ranks that have to be recorded first."""
        along = box.ranges[number]

        def rank(coordinate: int) -> int:
            return self._rank((*box.corner[:number], coordinate, *box.corner[number + 1 :]))

        edges = sorted({along[0], along[-1], *cuts})
        if missing := self._unrecorded(map(rank, edges)):
            return [], missing
        begins, index = [along[0]], 0
        while index < len(edges) - 1:
            low, high = edges[index], edges[index + 1]
            differ = self.digests[rank(low)] != self.digests[rank(high)]
            # Even and odd ranks often differ: a distance that is even would leave out one of the two. Looked for at the
            # begin of the range, where the first rank alone may differ, and behind parts that differ.
            may_alternate = (high - low) % 2 == 0 and (low <= along[0] + 1 or len(begins) > 2)
            if high - low > 1 and (differ or may_alternate):
                # Often the first or the last rank alone differs, as one that prints.
                is_first = low == along[0] or not differ
                middle = low + 1 if is_first else high - 1 if high == along[-1] else (low + high) // 2
                if missing := self._unrecorded([rank(middle)]):
                    return [], missing
                edges.insert(index + 1, middle)
                continue
            if differ or high in cuts:
                begins.append(high)
            index += 1
        return [range(begin, end) for begin, end in pairwise([*begins, along.stop])], set()

    def _leaves(self, box: Box, missing: set[int]) -> list[Box]:
        """Returns the parts of a box in which recorded ranks do the same.

        Adds ranks that have to be recorded first to `missing`.
        """
        own = self.digests[self._speaker(box)]
        odd = next((rank for rank in self._ranks(box) if self.digests.get(rank, own) != own), None)
        if odd is None:
            return [box]
        parts, unknown = self._divided(box)
        if not unknown and parts == [box]:
            # The ends of all axes are equal. Then the rank gets a part of its own, along one axis after the other.
            number = next(each for each, along in enumerate(box.ranges) if self._coordinate(odd, each) != along[0])
            parts, unknown = self._divided(box, (number, self._coordinate(odd, number)))
            if parts == [box]:  # too many parts
                return parts
        missing |= unknown
        return [leaf for part in parts if not unknown for leaf in self._leaves(part, missing)]

    def _speaker(self, box: Box) -> int:
        """Returns the rank that represents a box: its corner, or a recorded rank if the corner is not recorded."""
        corner = self._rank(box.corner)
        if corner in self.traces:
            return corner
        return next((rank for rank in self._ranks(box) if rank in self.traces), corner)

    def _coordinate(self, rank: int, number: int) -> int:
        assert self._axes is not None
        axis = self._axes[number]
        return rank // axis.stride % axis.size

    def _ranks(self, box: Box) -> Iterator[int]:
        return map(self._rank, product(*box.ranges))

    def _rank(self, point: Iterable[int]) -> int:
        assert self._axes is not None
        return sum(coordinate * axis.stride for coordinate, axis in zip(point, self._axes, strict=True))

    def _unrecorded(self, ranks: Iterable[int]) -> set[int]:
        return {rank for rank in ranks if rank not in self.traces}

    # Roles

    def _fold(self, roles: Iterable[int]) -> None:
        """Sets the classes, from a recorded rank for each rank. A recorded rank has the role of its own digest."""
        first: dict[str, int] = {}
        for rank in sorted(self.traces):
            first.setdefault(self.digests[rank], rank)
        recorded = [rank if rank in self.traces else role for rank, role in enumerate(roles)]
        self.classes = tuple(first[self.digests[rank]] for rank in recorded)

    def _unanswered(self, roles: Sequence[int]) -> set[int]:
        """Returns ranks that roles exchange messages with, unless the rank that represents them has such messages."""
        found = set()
        for rank in set(self.classes):
            messages = _messages(self.traces[rank])
            for peer in self._unrecorded(messages):
                theirs = _messages(self.traces[roles[peer]]).get(rank + roles[peer] - peer, [])
                answers = [each._replace(is_send=not each.is_send) for each in messages[peer]]
                # Each direction has an order of its own, which a stable sort by direction keeps.
                if sorted(answers, key=attrgetter("is_send")) != sorted(theirs, key=attrgetter("is_send")):
                    found.add(peer)
        return found

    def _confirmation(self, boxes: Sequence[Box]) -> set[int]:
        """Returns random ranks of roles that are not confirmed yet."""
        assert self._axes is not None
        confirmed = {self.digests[rank] for rank in self._random}
        begins = [sorted({box.ranges[number].start for box in boxes}) for number in range(len(self._axes))]
        unconfirmed: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        are_alike = set()
        for box in boxes:
            place = tuple(_place(along.start, begin) for along, begin in zip(box.ranges, begins, strict=True))
            for rank in self._ranks(box):
                if rank in self._random and self.digests[rank] == self.digests[self._speaker(box)]:
                    are_alike.add(place)
                if rank not in self.traces and self.digests[self.classes[rank]] not in confirmed:
                    unconfirmed[place].append(rank)
        chosen = set()
        for place, ranks in unconfirmed.items():
            if place not in are_alike:
                chosen |= self._drawn(ranks, ())
        return chosen

    def _drawn(self, ranks: Sequence[int], others: Collection[int]) -> set[int]:
        """Returns one random rank that is neither recorded nor one of `others`. Empty if there is none."""
        left = sorted(self._unrecorded(ranks) - set(others))
        # By the seed and the candidates alone, so that two runs record the same ranks.
        drawn = {random.Random(f"{self.seed} {left[0]}").choice(left)} if left else set()
        self._random |= drawn
        return drawn


def _place(begin: int, begins: Sequence[int]) -> int:
    """Returns the place of a range along an axis: 0 for the first, 2 for the last, 1 for all in the middle."""
    return 0 if begin == begins[0] else 2 if begin == begins[-1] else 1


def _messages(trace: Trace) -> dict[int, list[_Sent]]:
    """Returns the messages of a rank by its peers."""
    found: defaultdict[int, list[_Sent]] = defaultdict(list)
    for entry in trace.entries:
        if isinstance(entry, Message) and entry.peer >= 0:
            found[entry.peer].append(_Sent(entry.is_send, entry.tag, entry.num_bytes, entry.dtype))
    return found


class _Sent(NamedTuple):
    """Facts of a message that both sides share, except for its direction."""

    is_send: bool
    tag: int
    num_bytes: int
    dtype: str


def digest(trace: Trace) -> str:
    """Returns 32 hexadecimal digits, the same for two ranks that can represent each other.

    Groups count by their name and the distances of their ranks, messages by the positions of both sides in the group.
    Lines, modules and the numbers of storages do not count, nor does memory of the host.
    """
    found = hashlib.blake2b(digest_size=16)
    for fact in _facts(trace):
        found.update(repr(fact).encode())
    return found.hexdigest()


def _facts(trace: Trace) -> Iterator[object]:
    yield trace.has_expandable_segments
    live = [entry for entry in trace.live if not entry.on_host]
    sizes = {entry.storage: entry.num_bytes for entry in live}
    yield sorted((entry.kind, entry.num_bytes) for entry in live)
    freed: list[int] = []
    for entry in trace.entries:
        if isinstance(entry, Free):
            # By their sizes, since ranks may number their storages differently.
            if entry.storage in sizes:
                freed.append(sizes.pop(entry.storage))
            continue
        if isinstance(entry, Allocate) and entry.on_host:
            continue
        # Storages that are freed together are freed in any order, such as those of autocast's cache.
        if freed:
            yield sorted(freed)
            freed.clear()
        if isinstance(entry, Allocate):
            sizes[entry.storage] = entry.num_bytes
            yield entry.num_bytes, entry.kind
        else:
            yield _fact(trace, entry)
    yield sorted(freed)


def _fact(trace: Trace, entry: Entry) -> object:
    if isinstance(entry, Kernel):
        return (*entry[:6], _sizes(entry.reads), _sizes(entry.writes), entry.launches, entry.phase, entry.is_compiled)
    if isinstance(entry, Collective):
        group, root = trace.groups[entry.group], entry.root
        return (
            *entry[:3],
            form(group),
            entry.num_bytes,
            entry.dtype,
            entry.op,
            None if root < 0 else (root == trace.rank, group.ranks.index(root)),
            entry.blocking,
            entry.phase,
        )
    if isinstance(entry, Message):
        group = trace.groups[entry.group]
        # Both positions, not only their distance: middle stages of a pipeline do the same, but at different times.
        places = [group.ranks.index(rank) for rank in (trace.rank, entry.peer) if rank >= 0]
        return *entry[:3], places, form(group), *entry[5:11]
    return tuple(value for name, value in zip(entry._fields, entry, strict=True) if name != "place")


def _sizes(accesses: tuple[tuple[int, int], ...]) -> list[int]:
    return sorted(num_bytes for _, num_bytes in accesses)


def form(group: Group) -> tuple[str, tuple[int, ...]]:
    """Returns the form of a group: its name, and the distances of its ranks from the first."""
    return group.name, tuple(rank - group.ranks[0] for rank in group.ranks)
