"""A job as both players get it: programs of its roles, meetings, hosts of its ranks, and links. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from echelon.foresight.play.cluster import Cluster
from echelon.foresight.play.collectives import Cost, cost_of
from echelon.foresight.play.device import Device
from echelon.foresight.play.links import Links, Shares
from echelon.foresight.play.played import Played, PlayedRole
from echelon.foresight.play.program import Program, lower
from echelon.foresight.play.roles import Roles
from echelon.foresight.trace import Collective, Communication, Trace


class Price(NamedTuple):
    """Cost of communication on the side of one rank."""

    cost: Cost
    shares: Shares
    """Shares that the rank takes of its links."""


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
        self.matches = Roles(traces, classes)
        self.links: Links[Any] = Links(cluster, classes)
        self._prices: dict[tuple[object, ...], Price] = {}
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
        about = (entry.kind,) if isinstance(entry, Collective) else (entry.is_send, entry.peer, entry.batch < 0)
        key = (trace.rank, entry.group, entry.num_bytes, *about)
        known = self._prices.get(key)
        if known is None:
            cost = cost_of(self.cluster, trace, trace.rank, entry)
            known = self._prices[key] = Price(cost, tuple(self.links.shares(trace.rank, entry, cost)))
        return known

    def played(self, roles: Mapping[int, PlayedRole]) -> Played:
        """Combines the steps of all roles into the step of the job."""
        return Played(roles, self.classes, self.device, self.cluster)
