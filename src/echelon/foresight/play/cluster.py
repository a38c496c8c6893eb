"""Hosts, and the links inside and between them. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from echelon.arguments import is_amount, is_count, is_factor
from echelon.errors import LaunchError
from echelon.foresight.play.device import Curve


class Placement(NamedTuple):
    """Group of ranks as a collective sees it."""

    num_ranks: int
    num_hosts: int
    per_host: int
    """Members on the host with the fewest of them."""
    most_per_host: int
    """Members on the host with the most of them."""


@dataclass(frozen=True)
class Cluster:
    """Hosts with devices, and their network.

    Args:
        hosts: Number of ranks of each host, in the order of the ranks.
        bandwidth: Bytes per second that a rank sends to other hosts, by all of its NICs.
        latency: Seconds between hosts for a message without bytes.
        local_bandwidth: Bytes per second of a ring inside a host.
        local_latency: Seconds between ranks of a host for a message without bytes.
        rails: Number of networks between hosts, which a host's NICs join in turn: NICs of equal position on their hosts
            share a rail. 0 for a single network that joins all NICs.
        oversubscription: Sum of `bandwidth` over the ranks of a host, divided by the bytes per second that can leave
            it. 2 for a NIC for every two ranks, or for a switch with half as much bandwidth to other switches.
        links: Measured times of communication on one host, see `Device`. Empty if none were measured.
        overheads: Measured times of the hosts' own work for communication, in the form of `links`. A network between
            hosts adds its time.
        generation: Row of NCCL's tuning tables, as in `Device`. "" for links without NCCL.

    Raises:
        LaunchError: an argument is out of range.
    """

    hosts: tuple[int, ...]
    bandwidth: float
    latency: float
    local_bandwidth: float
    local_latency: float
    rails: int = 0
    oversubscription: float = 1.0
    generation: str = ""
    links: Mapping[str, Curve] = field(default_factory=dict, hash=False)
    overheads: Mapping[str, Curve] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.hosts or not all(is_count(count, 1) for count in self.hosts):
            raise LaunchError(f"hosts={self.hosts!r}: give the ranks of each host, at least 1 each")
        for name in ("bandwidth", "local_bandwidth"):
            if not getattr(self, name) > 0:
                raise LaunchError(f"{name}={getattr(self, name)!r}: give bytes per second above 0")
        for name in ("latency", "local_latency"):
            if not is_amount(getattr(self, name)):
                raise LaunchError(f"{name}={getattr(self, name)!r}: give seconds, at least 0")
        if not is_count(self.rails, 0):
            raise LaunchError(f"rails={self.rails!r}: give how many networks join the hosts, or 0 for a single one")
        if not is_factor(self.oversubscription) or self.oversubscription < 1:
            raise LaunchError(f"oversubscription={self.oversubscription!r}: give a ratio of at least 1")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._firsts[-1]

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.hosts))

    def host_of(self, rank: int) -> int:
        """Returns the number of a rank's host."""
        return bisect_right(self._firsts, rank)

    def placement(self, ranks: Sequence[int]) -> Placement:
        """Returns the distribution of a group over the hosts."""
        known = self._placements.get(ranks := tuple(ranks))
        if known is None:
            counts = Counter(map(self.host_of, ranks)).values()
            known = self._placements[ranks] = Placement(len(ranks), len(counts), min(counts), max(counts))
        return known

    @cached_property
    def _placements(self) -> dict[tuple[int, ...], Placement]:
        return {}

    def rail_of(self, rank: int) -> int:
        """Returns the rail of a rank's NIC. 0 if there are none."""
        return (rank - self._first_of(rank)) % self.rails if self.rails else 0

    def nic_of(self, src: int, dst: int) -> int:
        """Returns the rank through whose NIC a message leaves the host. With rails, it is on the receiver's rail."""
        if self.rail_of(src) == self.rail_of(dst):
            return src
        first = self._first_of(src)
        # A smaller host may have no NIC on that rail. Then its last one sends.
        return min(first + self.rail_of(dst), first + self.hosts[self.host_of(src)] - 1)

    def _first_of(self, rank: int) -> int:
        """Returns the first rank of a rank's host."""
        host = self.host_of(rank)
        return self._firsts[host - 1] if host else 0

    @cached_property
    def uplink(self) -> float:
        """Bytes per second that can leave the smallest host."""
        return min(self.hosts) * self.bandwidth / self.oversubscription

    def ring_bandwidth(self, placement: Placement) -> float:
        """Returns the bytes per second that pass between neighbours of a ring, over all of its channels.

        Each channel leaves a host by another NIC, so a group with g members on each host uses g of them. Traffic of
        other groups is left out.
        """
        if placement.num_hosts == 1:
            return self.local_bandwidth
        outward = min(placement.per_host * self.bandwidth, self.uplink)
        # With one member on each host no link inside of a host is used.
        return outward if placement.per_host == 1 else min(self.local_bandwidth, outward)


def hosts_of(world_size: int, hosts: int | Sequence[int] | None, per_host: int) -> tuple[int, ...]:
    """Returns the number of ranks of each host.

    Args:
        world_size: Number of ranks.
        hosts: Number of hosts of equal size, or number of ranks of each. None: as many full hosts as are needed.
        per_host: Devices of a host.

    Raises:
        LaunchError: the hosts do not have `world_size` ranks.
    """
    if hosts is None:
        full, rest = divmod(world_size, per_host)
        return (per_host,) * full + ((rest,) if rest else ())
    if is_count(hosts, 1):
        assert isinstance(hosts, int)
        if world_size % hosts:
            divisors = [count for count in range(1, world_size + 1) if world_size % count == 0]
            near = sorted(sorted(divisors, key=lambda count: abs(count - hosts))[:2])
            few, more = divmod(world_size, hosts)
            each = [few + 1] * more + [few] * (hosts - more)
            # One that fits a line: with fewer ranks than hosts, or many hosts, there is none.
            form = f", as hosts={each}" if few and hosts <= 8 else ""
            raise LaunchError(
                f"hosts={hosts}: {world_size} ranks do not divide evenly: give a divisor, such as "
                f"{' or '.join(map(str, near))}, or the ranks of each host{form}"
            )
        return (world_size // hosts,) * hosts
    if not isinstance(hosts, Sequence) or not all(is_count(count, 1) for count in hosts) or not hosts:
        raise LaunchError(f"hosts={hosts!r}: give a number of hosts, or a list of how many ranks each has")
    if sum(hosts) != world_size:
        raise LaunchError(f"hosts={list(hosts)} have {sum(hosts)} ranks, the world has {world_size}: make them equal")
    return tuple(hosts)
