"""What messages between simulated ranks cost: latency + bytes / bandwidth, on links that are full duplex."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from echelon.arguments import choices, is_amount, is_count, is_factor
from echelon.errors import LaunchError
from echelon.simulation.faults import FaultPlan
from echelon.simulation.scheduler import Ended, Scheduler

# When messages between simulated ranks leave and arrive, and what moving them takes from computing.


class Passage(NamedTuple):
    """When a message leaves and arrives (math.inf: never), and its place among what happens then."""

    left: float
    done: float
    """When its sender takes it for arrived: faults on the way are unknown to it."""
    arrives: float
    draw: float


class Traffic:
    """The links between all ranks: who uses them, and until when. Called by whichever task runs; nothing blocks."""

    def __init__(
        self, scheduler: Scheduler, world_size: int, link: Callable[[int, int], Network], faults: FaultPlan
    ) -> None:
        self._scheduler = scheduler
        self._faults = faults
        self._link = link
        self._links: dict[tuple[int, int], Network] = {}
        self._free_at = [0.0] * world_size
        """When what each rank has sent will have left it."""
        self._last: dict[tuple[int, int], tuple[float, float]] = {}
        """For each pair, when its last message arrives, with its draw: none overtakes another."""
        self._num_computing = [0] * world_size
        """How many tasks of each rank compute now."""
        self._owed = [0.0] * world_size
        """The seconds by which moving messages has held up each rank's computing."""

    def send(self, src: int, dst: int, num_bytes: int) -> Passage:
        """Puts a message on its way."""
        link = self._links.get((src, dst)) or self._find_link(src, dst)
        left = max(self._scheduler.now, self._free_at[src]) + num_bytes / link.bandwidth
        self._free_at[src] = left
        passage = self._pass(src, dst, left, left + link.latency)
        if link.overhead and num_bytes:
            seconds = link.overhead * num_bytes
            self._hold_up_at(passage.left, src, seconds)
            self._hold_up_at(passage.arrives, dst, seconds)
        return passage

    def _find_link(self, src: int, dst: int) -> Network:
        try:
            link = self._links[src, dst] = self._link(src, dst)
        except Exception as error:  # the user's function: to tell the other ranks would take a link, too
            self._scheduler.fail(error)
            raise Ended from error
        return link

    def compute(self, rank: int, seconds: float) -> None:
        """Lets the time pass that the running task of a rank computes: longer where messages come and go meanwhile."""
        self._num_computing[rank] += 1
        try:
            while seconds > 0:
                self._scheduler.sleep(seconds)
                seconds, self._owed[rank] = self._owed[rank], 0.0
        finally:
            self._num_computing[rank] -= 1

    def _hold_up_at(self, time: float, rank: int, seconds: float) -> None:
        if time <= self._scheduler.now:
            self._hold_up(rank, seconds)
        elif time < math.inf:
            self._scheduler.at(time, partial(self._hold_up, rank, seconds))

    def _hold_up(self, rank: int, seconds: float) -> None:
        """Has a rank spend time on a message. One that only waits has the time."""
        if self._num_computing[rank]:
            self._owed[rank] += seconds

    def _pass(self, src: int, dst: int, left: float, arrives: float) -> Passage:
        done, draw = arrives, self._scheduler.draw()
        if self._faults.faults:
            arrives = self._faults.arrival(src, dst, left, arrives)
            if arrives == math.inf:
                self._scheduler.awaits_nothing_lost = False
        last = self._last.get((src, dst))
        if last is not None and last > (arrives, draw):
            arrives, draw = last
        self._last[src, dst] = (arrives, draw)
        return Passage(left, done, arrives, draw)


@dataclass(frozen=True)
class Network:
    """A network between ranks.

    A message leaves its rank when the ones that the rank sent before have left, takes bytes / bandwidth to leave and
    arrives `latency` later; then its send is done, too. Receiving takes nothing away from sending.

    Args:
        latency: seconds from the last byte's leaving to its arrival.
        bandwidth: bytes per second that a rank can send; math.inf for no limit.
        hosts: how many ranks each host has, in the order of the ranks; None: each rank is on a host of its own.
            `latency` and `bandwidth` are those between hosts.
        local_latency: seconds between two ranks of one host.
        local_bandwidth: bytes per second between two ranks of one host.
        overhead: seconds of computing that a byte costs its sender, and again its receiver, if they compute meanwhile;
            0 where a core of its own moves the messages. Only between hosts. (The o of LogGP: Alexandrov et al., 1995.)

    Raises:
        LaunchError: a negative latency or overhead, a bandwidth that is not above 0, or a host without ranks.
    """

    latency: float = 1e-5
    bandwidth: float = 1e9
    hosts: Sequence[int] | None = None
    local_latency: float = 1e-6
    local_bandwidth: float = 1e10
    overhead: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency", "local_latency", "overhead"):
            value = getattr(self, name)
            if not is_amount(value):
                raise LaunchError(f"{name}={value!r}: give seconds, at least 0")
        for name in ("bandwidth", "local_bandwidth"):
            value = getattr(self, name)
            if not (is_factor(value) or value == math.inf):
                raise LaunchError(f"{name}={value!r}: give bytes per second above 0, math.inf for no limit")
        if self.hosts is not None:
            if not self.hosts or not isinstance(self.hosts, Sequence) or not all(is_count(n, 1) for n in self.hosts):
                raise LaunchError(f"hosts={self.hosts!r}: give a list of how many ranks each host has, each at least 1")
            object.__setattr__(self, "hosts", tuple(self.hosts))

    @classmethod
    def named(cls, name: str) -> Network:
        """Returns one of `PRESETS`.

        Raises:
            LaunchError: there is none of that name.
        """
        if name not in PRESETS:
            raise LaunchError(f"network={name!r}: {choices(name, PRESETS)}, or Network(latency=, bandwidth=)")
        return PRESETS[name]

    def between(self, src: int, dst: int) -> Network:
        """Returns the network that a message from `src` to `dst` takes: this one, or the one inside their host."""
        if self.hosts is None or self._host(src) != self._host(dst):
            return self
        return Network(self.local_latency, self.local_bandwidth)

    def _host(self, rank: int) -> int:
        assert self.hosts is not None
        first = 0
        for host, count in enumerate(self.hosts):
            first += count
            if rank < first:
                return host
        return -1


PRESETS: Mapping[str, Network] = MappingProxyType(
    {
        "1GbE": Network(latency=50e-6, bandwidth=117e6),
        "10GbE": Network(latency=20e-6, bandwidth=1.17e9),
        "25GbE": Network(latency=10e-6, bandwidth=2.9e9),
        "100GbE": Network(latency=5e-6, bandwidth=11.7e9),
        "loopback": Network(latency=20e-6, bandwidth=2e9),
        "shared-memory": Network(latency=1e-6, bandwidth=10e9),
        "nvlink-like": Network(latency=2e-6, bandwidth=300e9),
    }
)
"""Round figures of what programs see, not of what is printed on the box: Ethernet less its headers, TCP's latency."""

NetworkLike: TypeAlias = Network | str | Callable[[int, int], Network] | None
"""A network, the name of one, a function from two ranks to theirs, or None: all messages arrive at once."""

INSTANT = Network(0.0, math.inf)


def link_function(network: NetworkLike, world_size: int) -> Callable[[int, int], Network]:
    """Returns the function from two ranks to the network between them.

    Raises:
        LaunchError: an unknown name, no network, or hosts that do not have `world_size` ranks.
    """
    if callable(network):
        return _checked(network)
    chosen = INSTANT if network is None else Network.named(network) if isinstance(network, str) else network
    if not isinstance(chosen, Network):
        raise LaunchError(f"network={network!r}: give a Network, the name of one, or a function from two ranks to one")
    if chosen.hosts is not None and sum(chosen.hosts) != world_size:
        raise LaunchError(
            f"hosts={list(chosen.hosts)} have {sum(chosen.hosts)} ranks, the simulation has {world_size}: make "
            "them equal"
        )
    return chosen.between


def _checked(network: Callable[[int, int], Network]) -> Callable[[int, int], Network]:
    """Returns a user's function, which raises LaunchError where that gives no network."""

    def between(src: int, dst: int) -> Network:
        found = network(src, dst)
        if not isinstance(found, Network):
            raise LaunchError(f"the network from rank {src} to {dst} is {found!r}: let the function return a Network")
        return found

    return between


def host_numbers(network: NetworkLike, world_size: int) -> tuple[int, ...]:
    """Returns the host of each rank, by number; each is on one of its own where the network does not say."""
    if not isinstance(network, Network) or network.hosts is None:
        return tuple(range(world_size))
    return tuple(host for host, count in enumerate(network.hosts) for _ in range(count))
