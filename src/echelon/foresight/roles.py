"""Choice of the ranks that are recorded, one for each role, and of the role that stands for each rank. Pure.

A rank is a point in the grid that the groups of recorded ranks span, such as data parallel x tensor parallel. Along
each axis both ends are recorded. If they do the same, all points between them are taken to do the same; if not, the
axis is divided: next to its first point, next to its last one, then in the middle, and so on. A rank off the axes has
the role of the point with the first coordinates of its intervals. One random rank of each role, which has not stood for
others yet, is recorded in confirmation.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import NamedTuple

from echelon.foresight.digest import digest
from echelon.foresight.trace import Message, Trace

_FEW_ENTRIES = 20_000
_FEW_RANKS = 16
"""Ranks, and entries of all of them, up to which every rank is recorded: some seconds."""
_MOST_POINTS = 1024
"""Ranks that are recorded at most."""


class Axis(NamedTuple):
    """Axis of the grid of ranks."""

    size: int
    stride: int


def axes_of(trace: Trace) -> tuple[Axis, ...]:
    """Returns the axes of the grid that a rank's groups span, from the outermost to the innermost.

    Groups of equal distances are axes. Further axes fill the gaps, so that all ranks are points.
    """
    found: set[Axis] = set()
    for group in trace.groups:
        ranks = group.ranks
        steps = {after - before for before, after in pairwise(ranks)}
        if len(steps) == 1 and 1 < len(ranks) < trace.world_size and min(steps) > 0:
            found.add(Axis(len(ranks), steps.pop()))
    axes: list[Axis] = []
    reach = 1
    # From the innermost on. An axis of several others, as that of a flattened mesh, is left out.
    for axis in sorted(found, key=lambda each: (each.stride, each.size)):
        if axis.stride < reach or axis.stride % reach or trace.world_size % (axis.stride * axis.size):
            continue
        if axis.stride > reach:
            axes.append(Axis(axis.stride // reach, reach))
        axes.append(axis)
        reach = axis.stride * axis.size
    if reach < trace.world_size:
        axes.append(Axis(trace.world_size // reach, reach))
    return tuple(reversed(axes))


@dataclass
class Roles:
    """Recorded ranks so far, and the choice of the next ones."""

    world_size: int
    seed: int = 0
    traces: dict[int, Trace] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    classes: tuple[int, ...] = ()
    """Rank of the role that stands for each rank. Empty until all roles are known."""
    _axes: tuple[Axis, ...] | None = None
    _cuts: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Coordinates at which an interval begins because a confirmation failed, by axis."""
    _confirmed: set[int] = field(default_factory=set)
    """Roles of which a random rank was confirmed."""

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
            missing = [rank for rank in range(self.world_size) if rank not in self.traces]
            if not missing:
                self._fold(range(self.world_size))
            return missing
        if self._axes is None:
            self._axes = axes_of(self.traces[min(self.traces)])
        intervals = []
        for number, axis in enumerate(self._axes):
            found, missing = self._intervals(number, axis)
            if missing:
                return missing
            intervals.append(found)
        if math.prod(map(len, intervals)) > _MOST_POINTS:
            intervals = [found[:1] for found in intervals]
        points = [self._rank(point) for point in product(*intervals)]
        if missing := self._unrecorded([*points, *self._peers()]):
            return missing
        roles = [self._rank(self._nearest(intervals, rank)) for rank in range(self.world_size)]
        self._fold(roles)
        return self._confirmation(roles)

    def _intervals(self, number: int, axis: Axis) -> tuple[list[int], list[int]]:
        """Returns the first coordinates of an axis's intervals, or the ranks that have to be recorded to know them."""

        def rank(coordinate: int) -> int:
            return coordinate * axis.stride

        edges = sorted({0, axis.size - 1, *(each for each in self._cuts[number] if each < axis.size)})
        if missing := self._unrecorded(map(rank, edges)):
            return [], missing
        begins, index = [0], 0
        while index < len(edges) - 1:
            low, high = edges[index], edges[index + 1]
            if self.digests[rank(low)] != self.digests[rank(high)]:
                if high - low > 1:
                    # Often the first or the last rank alone differs, as one that prints.
                    middle = low + 1 if low == 0 else high - 1 if high == axis.size - 1 else (low + high) // 2
                    if missing := self._unrecorded([rank(middle)]):
                        return [], missing
                    edges.insert(index + 1, middle)
                    continue
                begins.append(high)
            elif high in self._cuts[number]:
                begins.append(high)
            index += 1
        return begins, []

    def _nearest(self, intervals: Sequence[Sequence[int]], rank: int) -> list[int]:
        assert self._axes is not None
        point = []
        for axis, begins in zip(self._axes, intervals, strict=True):
            coordinate = rank // axis.stride % axis.size
            point.append(max(each for each in begins if each <= coordinate))
        return point

    def _rank(self, point: Iterable[int]) -> int:
        assert self._axes is not None
        return sum(coordinate * axis.stride for coordinate, axis in zip(point, self._axes, strict=True))

    def _unrecorded(self, ranks: Iterable[int]) -> list[int]:
        return sorted({rank for rank in ranks if rank not in self.traces})

    def _peers(self) -> list[int]:
        """Returns ranks that recorded ones of new roles exchange messages with."""
        firsts = {self.digests[rank]: rank for rank in sorted(self.traces, reverse=True)}
        return [
            entry.peer
            for rank in firsts.values()
            for entry in self.traces[rank].entries
            if isinstance(entry, Message) and entry.peer >= 0
        ]

    def _fold(self, roles: Iterable[int]) -> None:
        """Sets the classes, from a recorded rank for each rank. A rank that was recorded has its own digest's role."""
        first: dict[str, int] = {}
        for rank in sorted(self.traces):
            first.setdefault(self.digests[rank], rank)
        recorded = [rank if rank in self.traces else role for rank, role in enumerate(roles)]
        self.classes = tuple(first[self.digests[rank]] for rank in recorded)

    def _confirmation(self, roles: Sequence[int]) -> list[int]:
        """Returns random ranks of roles that are not confirmed yet. Divides axes where a confirmation has failed."""
        assert self._axes is not None
        for rank in self.traces:
            if self.digests[rank] != self.digests[roles[rank]]:
                cuts = len(self._cuts), sum(map(len, self._cuts.values()))
                for number, axis in enumerate(self._axes):
                    coordinate = rank // axis.stride % axis.size
                    self._cuts[number] |= {coordinate, coordinate + 1}
                if (len(self._cuts), sum(map(len, self._cuts.values()))) != cuts:
                    return self.next_ranks()
        members: defaultdict[int, list[int]] = defaultdict(list)
        for rank, role in enumerate(self.classes):
            if rank not in self.traces:
                members[role].append(rank)
        chosen = []
        for role in sorted(members.keys() - self._confirmed):
            self._confirmed.add(role)
            chosen.append(random.Random(f"{self.seed} {role}").choice(members[role]))
        return sorted(chosen)
