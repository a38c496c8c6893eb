"""A job as both players get it: programs of its roles, meetings, hosts of its ranks, and links. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from echelon.foresight.play.cluster import Cluster
from echelon.foresight.play.collectives import Cost, cost_of
from echelon.foresight.play.counterparts import Counterparts
from echelon.foresight.play.device import Device
from echelon.foresight.play.links import Links, Shares
from echelon.foresight.play.placements import Placements
from echelon.foresight.play.played import Played, PlayedRole
from echelon.foresight.play.program import Program, lower
from echelon.foresight.trace import Collective, Communication, Message, Trace

_FEW_RANKS = 8
"""Most ranks of a group that an assumption names."""


class Price(NamedTuple):
    """Cost of communication on the side of a role: that of its rank whose group lies worst on the hosts."""

    cost: Cost
    shares: Shares
    """Shares that the rank takes of its links."""
    is_local: bool
    """Whether all of its ranks are on one host. A receive from any source counts as local."""


class Job:
    """One step of all ranks, on a device and a cluster.

    Args:
        traces: A trace for each role, by its rank.
        classes: The role of every rank of the world.
        device: The device of every rank. The slowest of them sets the pace.
        cluster: Hosts and network of all ranks.
    """

    def __init__(
        self,
        traces: Mapping[int, Trace],
        classes: Mapping[int, int] | Sequence[int],
        device: Device,
        cluster: Cluster,
    ) -> None:
        self.classes = classes
        self.device = device
        self.cluster = cluster
        self.counterparts = Counterparts(traces, classes)
        self.links: Links[Any] = Links(cluster, classes)
        self._placements = Placements(cluster, classes)
        self._prices: dict[tuple[object, ...], Price] = {}
        self._assumptions: dict[str, None] = {}
        slowest = device.slowest(cluster.world_size)
        self.programs: dict[int, Program] = {rank: lower(trace, slowest) for rank, trace in traces.items()}

    @cached_property
    def members(self) -> Mapping[int, Counter[int]]:
        """Ranks of each role, by host."""
        members: dict[int, Counter[int]] = {rank: Counter() for rank in self.programs}
        for rank in range(self.cluster.world_size):
            members[self.classes[rank]][self.cluster.host_of(rank)] += 1
        return members

    def price(self, trace: Trace, entry: Communication) -> Price:
        """Returns the duration of a collective or message on idle links, and the links that it uses."""
        # Fast path: a step has thousands of calls, and tens of distinct ones.
        about = (
            (entry.kind, entry.root) if isinstance(entry, Collective) else (entry.is_send, entry.peer, entry.batch < 0)
        )
        key = (trace.rank, entry.group, entry.num_bytes, *about)
        known = self._prices.get(key)
        if known is None:
            shifts = self._placements.shifts(trace, entry)
            if not shifts.is_complete:
                self._assume_placement(trace, entry)
            # All wait for the slowest in the end. Of equal ones the first counts, which is that of the recorded rank.
            prices = [self._price_at(trace, entry, distance) for distance in shifts.distances]
            known = self._prices[key] = max(prices, key=lambda price: price.cost.seconds)
        return known

    def _price_at(self, trace: Trace, entry: Communication, distance: int) -> Price:
        """Returns the price in the group that lies a distance from the recorded one."""
        ranks, rank = tuple(each + distance for each in trace.groups[entry.group].ranks), trace.rank
        ends, there = ranks, entry
        if isinstance(entry, Message):
            rank += distance
            ends = (rank, entry.peer + distance if entry.peer >= 0 else rank)
            entry = there = entry._replace(peer=ends[1]) if entry.peer >= 0 else entry
        elif entry.root >= 0:
            there = entry._replace(root=entry.root + distance)
        cost = cost_of(self.cluster, ranks, trace.rank + distance, there)
        is_local = self.cluster.placement(ends).num_hosts == 1
        return Price(cost, tuple(self.links.shares(rank, entry, cost)), is_local)

    def _assume_placement(self, trace: Trace, entry: Communication) -> None:
        group = trace.groups[entry.group]
        known = f"ranks {', '.join(map(str, group.ranks))}" if len(group.ranks) <= _FEW_RANKS else "its own group"
        name = f" of group {group.name}" if group.name else ""
        self._assumptions[
            f"{entry.kind}{name} at {trace.line(entry)}: the groups of all ranks that do the same as rank {trace.rank} "
            f"lie on the hosts as {known}"
        ] = None

    def played(self, roles: Mapping[int, PlayedRole]) -> Played:
        """Combines the steps of all roles into the step of the job."""
        return Played(roles, self.classes, self.device, self.cluster, tuple(self._assumptions))
