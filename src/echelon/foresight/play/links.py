"""Links that communication shares while it is under way. Pure.

Each communication takes a share of the links that it uses: its bytes there, divided by the bytes that the link could
pass in the same time. While the shares of a link add up to more than 1, all of its communication is slowed down alike,
so that the link is just full. A communication is as slow as on its fullest link.

A role represents a class of ranks that do the same at the same time. Each has its own NIC and its own links inside the
host, so these are counted once for a role, however many groups of its kind there are. All ranks of a host share its
uplink: there a role counts for as many ranks as it has on that host. Hosts with equal roles are counted once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from echelon.foresight.play.cluster import Cluster
from echelon.foresight.play.collectives import Cost
from echelon.foresight.trace import Communication, Message

_FULL = 1 + 1e-9
"""Sum of shares above which a link is too full, with a margin for rounding."""


class Link(NamedTuple):
    """One direction of a link."""

    kind: str
    """"nic" or "local" of a role's ranks, or "uplink" of hosts."""
    number: int
    """Role, or number of the hosts' kind."""
    is_outward: bool


_Flow = TypeVar("_Flow", bound=Hashable)
Shares: TypeAlias = Sequence[tuple[Link, float]]
"""Links, with the share of each that communication takes at full speed."""


class Links(Generic[_Flow]):
    """Links of all ranks, and the communication on them."""

    def __init__(self, cluster: Cluster, classes: Mapping[int, int] | Sequence[int]) -> None:
        self._cluster = cluster
        self._classes = classes
        self._uplinks = _uplinks(cluster, classes) if cluster.oversubscription > 1 else {}
        self._flows: defaultdict[Link, dict[_Flow, float]] = defaultdict(dict)
        """Communication of each link, with its share."""
        self._loads: defaultdict[Link, float] = defaultdict(float)
        """Sum of the shares of each link."""
        self._shares: dict[_Flow, Shares] = {}
        self._rates: dict[_Flow, float] = {}

    def shares(self, rank: int, entry: Communication, cost: Cost) -> Iterable[tuple[Link, float]]:
        """Yields the links that communication takes on the side of a recorded rank, with its share of each."""
        role = by = self._classes[rank]
        ways: tuple[bool, ...] = (True, False)
        if isinstance(entry, Message):
            ways = (entry.is_send,)
            if entry.is_send and cost.nic:
                # With rails the message may leave by the NIC of another rank of the host.
                by = self._classes[self._cluster.nic_of(rank, entry.peer)]
        elif entry.kind in ("gather", "scatter") and entry.root >= 0 and cost.algorithm == "pairwise":
            # The root of a gather receives alone, and that of a scatter sends alone.
            ways = ((entry.kind == "scatter") == (rank == entry.root),)
        for way in ways:
            if cost.local:
                yield Link("local", role, way), cost.local
            if cost.nic:
                yield Link("nic", by, way), cost.nic
            if cost.uplink:
                for number, share in self._uplinks.get(role, ()):
                    yield Link("uplink", number, way), share * cost.uplink

    def begin(self, flow: _Flow, shares: Shares) -> list[tuple[_Flow, float]]:
        """Adds communication. Returns it and the others whose rates have changed, with their rates.

        A rate is the speed relative to the same communication alone.
        """
        for link, share in shares:
            flows = self._flows[link]
            # Members of one role have the same links, and each takes its share.
            flows[flow] = flows.get(flow, 0.0) + share
            self._loads[link] += share
        self._shares[flow] = shares
        self._rates[flow] = rate = self._rate(shares)
        full = [link for link, _ in shares if self._loads[link] > _FULL]
        return [(flow, rate), *self._changed(full)] if full else [(flow, rate)]

    def end(self, flow: _Flow) -> list[tuple[_Flow, float]]:
        """Removes communication. Returns the others whose rates have changed, with their rates."""
        shares = self._shares.pop(flow)
        del self._rates[flow]
        # Only links that were too full have held up others.
        full = [link for link, _ in shares if self._loads[link] > _FULL]
        for link, _ in shares:
            flows = self._flows[link]
            if flows.pop(flow, None) is not None:
                # Summed again, so that rounding errors do not add up over a step.
                self._loads[link] = sum(flows.values())
        return self._changed(full) if full else []

    def rate(self, flow: _Flow) -> float:
        """Returns the rate of communication that is under way."""
        return self._rates[flow]

    def _changed(self, links: Iterable[Link]) -> list[tuple[_Flow, float]]:
        changed = []
        for flow in dict.fromkeys(flow for link in links for flow in self._flows[link]):
            rate = self._rate(self._shares[flow])
            if rate != self._rates[flow]:
                self._rates[flow] = rate
                changed.append((flow, rate))
        return changed

    def _rate(self, shares: Shares) -> float:
        load = max([self._loads[link] for link, _ in shares], default=0.0)
        return 1.0 if load <= _FULL else 1.0 / load


def _uplinks(cluster: Cluster, classes: Mapping[int, int] | Sequence[int]) -> dict[int, tuple[tuple[int, float], ...]]:
    """Returns the uplinks of each role: kinds of hosts, with the share that its ranks there take at full speed."""
    counts: list[Counter[int]] = [Counter() for _ in cluster.hosts]
    for rank in range(cluster.world_size):
        counts[cluster.host_of(rank)][classes[rank]] += 1
    kinds: dict[tuple[tuple[int, int], ...], int] = {}
    found: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for host, ranks in zip(cluster.hosts, counts, strict=True):
        kind = tuple(sorted(ranks.items()))
        if kind in kinds:
            continue
        kinds[kind] = len(kinds)
        for role, count in kind:
            found[role].append((kinds[kind], count * cluster.oversubscription / host))
    return {role: tuple(uplinks) for role, uplinks in found.items()}
