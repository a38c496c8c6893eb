"""Parts of the grid in which the ranks of a role have their groups, as these lie on the hosts. Pure.

A role is recorded with the groups of one rank. Its other ranks have groups of the same form elsewhere, which may lie on
the hosts in other ways. Of groups of 6 ranks on hosts of 8, every second one spans two hosts. Three kinds of groups are
known for each rank: those along axes of a mesh, those with a single rank of the role, and those of messages, whose ends
have the same places in all groups of the role.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from echelon.foresight.play.cluster import Cluster
from echelon.foresight.trace import Communication, Message, Trace


class Shifts(NamedTuple):
    """Distances of groups from the recorded one. Groups that lie on the hosts in the same way count once."""

    distances: tuple[int, ...] = (0,)
    """Distances in ranks, first 0, which is that of the recorded group."""
    is_complete: bool = True
    """Whether the groups of all ranks of the role are known."""


class _Axis(NamedTuple):
    stride: int
    size: int


class Placements:
    """Groups of the ranks of each role on a cluster."""

    def __init__(self, cluster: Cluster, classes: Mapping[int, int] | Sequence[int]) -> None:
        self._cluster = cluster
        self._classes = classes
        self._members: dict[int, list[int]] = {}
        self._known: dict[tuple[int, int, int], Shifts] = {}
        first, last = cluster.hosts[0], cluster.hosts[-1]
        is_even = last <= first and all(count == first for count in cluster.hosts[:-1])
        self._period = first if is_even else cluster.world_size
        """Distance at which ranks lie on the hosts in the same way."""

    def shifts(self, trace: Trace, entry: Communication) -> Shifts:
        """Returns the distances of the groups in which the ranks of a role have a collective or a message."""
        # Fast path: on one host all groups of a form are alike.
        if len(self._cluster.hosts) == 1:
            return Shifts()
        peer = entry.peer if isinstance(entry, Message) else -1
        key = trace.rank, entry.group, peer
        known = self._known.get(key)
        if known is None:
            ranks = trace.groups[entry.group].ranks
            if not isinstance(entry, Message):
                known = self._of_collective(trace.rank, ranks)
            elif peer >= 0:
                # Digests compare the places of both ends, so each rank of the role has them in its own group.
                known = self._distinct(self._distances(trace.rank), (*ranks, peer))
            else:
                known = Shifts()
            self._known[key] = known
        return known

    def _of_collective(self, rank: int, ranks: tuple[int, ...]) -> Shifts:
        members, own = self._members_of(rank), set(ranks)
        # Such as the group of all ranks.
        if own.issuperset(members):
            return Shifts()
        if sum(self._classes[each] == self._classes[rank] for each in own) == 1:
            # No other rank of the group has this role, so the groups of the role have it at the same place.
            return self._distinct(self._distances(rank), ranks)
        first, axes = min(own), _axes_of(sorted(own))
        if axes is None or _first(first, axes) != first:
            return Shifts(is_complete=False)
        return self._distinct((_first(member, axes) - first for member in members), ranks)

    def _distinct(self, distances: Iterable[int], ranks: tuple[int, ...]) -> Shifts:
        """Returns the distances at which ranks have the same classes, one for each way to lie on the hosts."""
        classes = self._classes_of(ranks)
        found = {0: 0}
        unknown = set()
        for distance in distances:
            way = distance % self._period
            if way in found:
                continue
            if self._classes_of([rank + distance for rank in ranks]) == classes:
                found[way] = distance
            else:
                unknown.add(way)
        return Shifts(tuple(found.values()), unknown <= found.keys())

    def _classes_of(self, ranks: Sequence[int]) -> Counter[int] | None:
        """Returns the number of ranks of each class. None if there are no such ranks."""
        if min(ranks) < 0 or max(ranks) >= self._cluster.world_size:
            return None
        return Counter([self._classes[rank] for rank in ranks])

    def _distances(self, rank: int) -> Iterable[int]:
        return (member - rank for member in self._members_of(rank))

    def _members_of(self, rank: int) -> Sequence[int]:
        """Returns the ranks of a recorded rank's role."""
        if not self._members:
            for each in range(self._cluster.world_size):
                self._members.setdefault(self._classes[each], []).append(each)
        return self._members[self._classes[rank]]


def _axes_of(ranks: Sequence[int]) -> list[_Axis] | None:
    """Returns the axes of the mesh that ranks in ascending order make, from the innermost. None if they make none."""
    axes: list[_Axis] = []
    rest = [rank - ranks[0] for rank in ranks]
    while len(rest) > 1:
        stride, size = rest[1], 1
        while size < len(rest) and rest[size] == size * stride:
            size += 1
        outer = rest[::size]
        is_nested = not axes or stride % (axes[-1].stride * axes[-1].size) == 0
        if not is_nested or rest != [begin + step * stride for begin in outer for step in range(size)]:
            return None
        axes.append(_Axis(stride, size))
        rest = outer
    return axes


def _first(rank: int, axes: Iterable[_Axis]) -> int:
    """Returns the first rank of a rank's group along axes of a mesh of all ranks."""
    return rank - sum(rank // axis.stride % axis.size * axis.stride for axis in axes)
