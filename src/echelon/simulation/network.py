"""Network between simulated ranks: a message costs latency + bytes / bandwidth, on full-duplex links."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from echelon.arguments import choices, is_amount, is_count, is_factor, refuse_others
from echelon.errors import LaunchError
from echelon.simulation.faults import FaultPlan
from echelon.simulation.scheduler import Ended, Scheduler


class MessageTimes(NamedTuple):
    """Times of one message, in virtual seconds. `arrives` is math.inf if it is lost."""

    left: float
    done: float
    """End of the send for its sender, which does not know of faults on the way."""
    arrives: float
    draw: float
    """Order among events at the time of arrival."""


@dataclass(slots=True, eq=False)
class _Computation:
    """Computation of a task that is under way."""

    until: float = 0.0
    """Time of its end, without the delays below."""
    owed: float = 0.0
    """Seconds by which it is delayed since the last end that was set."""


class Traffic:
    """State of the links between all ranks, and the overhead that messages add to computing.

    Called by the running task. Only `compute` blocks.
    """

    def __init__(
        self, scheduler: Scheduler, world_size: int, link: Callable[[int, int], Network], faults: FaultPlan
    ) -> None:
        self._scheduler = scheduler
        self._clock = scheduler.clock
        self._faults = faults
        self._link = link
        self._links: dict[tuple[int, int], Network] = {}
        self._free_at = [0.0] * world_size
        """Time at which all messages sent so far have left, per rank."""
        self._last: dict[tuple[int, int], tuple[float, float]] = {}
        """Arrival and draw of the last message of each pair."""
        self._computing: list[list[_Computation]] = [[] for _ in range(world_size)]
        """Computations under way, per rank."""

    def send(self, src: int, dst: int, num_bytes: int, is_news: bool = False) -> MessageTimes:
        """Sends a message, or news: reserves its sender's link and returns its times. Never blocks."""
        link = self.link(src, dst)
        # The sender is the bottleneck: its messages leave one after another, whichever ranks they are for.
        left = max(self._clock.now, self._free_at[src]) + num_bytes / link.bandwidth
        self._free_at[src] = left
        times = self._pass(src, dst, left, left + link.latency, is_news)
        # News have no bytes, and take no computing.
        if link.overhead and num_bytes:
            seconds = link.overhead * num_bytes
            self.hold_up_at(times.left, src, seconds)
            self.hold_up_at(times.arrives, dst, seconds)
        return times

    def link(self, src: int, dst: int) -> Network:
        """Returns the network from one rank to another."""
        return self._links.get((src, dst)) or self._find_link(src, dst)

    def free_at(self, rank: int) -> float:
        """Returns the time at which all messages that a rank has sent so far have left."""
        return self._free_at[rank]

    def reserve(self, rank: int, last_left: float, seconds: float) -> None:
        """Keeps a rank's link busy for the messages of a whole collective.

        Args:
            rank: The rank.
            last_left: Time at which the last of them has left.
            seconds: Their time on the link. In between, other messages can leave.
        """
        free_at = self._free_at[rank]
        self._free_at[rank] = max(free_at, min(last_left, max(free_at, self._clock.now) + seconds))

    def _find_link(self, src: int, dst: int) -> Network:
        try:
            link = self._links[src, dst] = self._link(src, dst)
        # The user's function failed. Failing this rank alone would not do: its failure needs links to reach the others.
        except Exception as error:
            self._scheduler.fail(error)
            raise Ended from error
        return link

    def compute(self, rank: int, seconds: float, on_one_core: bool) -> None:
        """Lets the running task of a rank compute for `seconds`, plus the delays meanwhile. Blocks.

        Args:
            rank: The rank.
            seconds: Its computing time.
            on_one_core: Whether other computations of the rank need the same core, so that they delay each other.
        """
        under_way = self._computing[rank]
        mine = _Computation()
        if on_one_core:
            # The shorter one goes first, as a thread does that wakes up beside one that computes for long. The longer
            # one ends when both are done, as it would if they took turns.
            alone = seconds
            for other in under_way:
                left = other.until - self._clock.now + other.owed
                if alone <= left:
                    other.owed += alone
                else:
                    seconds += left
        under_way.append(mine)
        try:
            # A delay takes time, in which others may add more.
            while seconds > 0:
                mine.until = self._clock.now + seconds
                self._scheduler.sleep(seconds)
                seconds, mine.owed = mine.owed, 0.0
        finally:
            under_way.remove(mine)

    def hold_up_at(self, time: float, rank: int, seconds: float) -> None:
        """Delays a rank's computing at `time` by a message's overhead."""
        if time <= self._clock.now:
            self._hold_up(rank, seconds)
        elif time < math.inf:
            self._clock.at(time, partial(self._hold_up, rank, seconds))

    def _hold_up(self, rank: int, seconds: float) -> None:
        """Delays a rank's computing by a message's overhead. No effect on a rank that only waits."""
        for computation in self._computing[rank]:
            computation.owed += seconds

    def _pass(self, src: int, dst: int, left: float, arrives: float, is_news: bool) -> MessageTimes:
        done, draw = arrives, self._clock.draw()
        if self._faults.faults:
            arrives = self._faults.arrival(src, dst, left, arrives, is_news)
            # From now on a rank may wait until its timeout without a mistake in the program.
            if arrives == math.inf:
                self._clock.has_lost_events = True
        # No message overtakes another of its pair, as in a TCP connection: neither by faults nor by its draw.
        last = self._last.get((src, dst))
        if last is not None and last > (arrives, draw):
            arrives, draw = last
        self._last[src, dst] = (arrives, draw)
        return MessageTimes(left, done, arrives, draw)


@refuse_others()
@dataclass(frozen=True)
class Network:
    """Network between ranks.

    A message starts when its rank's earlier messages have left. It takes bytes / bandwidth to leave, and arrives
    `latency` later; then its send is done, too. Receiving does not slow down sending.

    Args:
        latency: seconds between hosts, from the departure of the last byte to its arrival.
        bandwidth: bytes per second that a rank can send to other hosts; math.inf for no limit.
        hosts: number of ranks on each host, in the order of the ranks. None: each rank is on a host of its own.
        local_latency: seconds between two ranks of one host.
        local_bandwidth: bytes per second between two ranks of one host.
        overhead: seconds of computing that a byte costs its sender, and again its receiver, if they compute meanwhile.
            0 if a separate core moves the messages. Only between hosts. (The o of LogGP: Alexandrov et al., 1995.)

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
    def named(cls, name: str, measured: Mapping[str, Network] = MappingProxyType({})) -> Network:
        """Returns the network of a name, in any case: one of `measured`, else one of `PRESETS`.

        Args:
            name: the name.
            measured: networks that were measured, by name.

        Raises:
            LaunchError: there is none of that name.
        """
        known = {**PRESETS, **measured}
        by_lower = {each.lower(): known[each] for each in known}
        if name.lower() not in by_lower:
            # A command line names it, too, and has no other form of a network.
            raise LaunchError(f"network={name!r}: {choices(name, known)}; in Python also Network(latency=, bandwidth=)")
        return by_lower[name.lower()]

    def between(self, src: int, dst: int) -> Network:
        """Returns the network from `src` to `dst`: this one, or the local one if they share a host.

        Args:
            src, dst: ranks of the sender and the receiver.

        Raises:
            IndexError: a rank that is on none of `hosts`.
        """
        hosts = self._host_of
        if not hosts or hosts[src] != hosts[dst]:
            return self
        return Network(self.local_latency, self.local_bandwidth)

    @cached_property
    def _host_of(self) -> tuple[int, ...]:
        """Number of each rank's host. Empty if each has its own."""
        return tuple(host for host, count in enumerate(self.hosts or ()) for _ in range(count))


PRESETS: Mapping[str, Network] = MappingProxyType(
    {
        "1GbE": Network(latency=50e-6, bandwidth=117e6),
        "10GbE": Network(latency=20e-6, bandwidth=1.17e9),
        "25GbE": Network(latency=10e-6, bandwidth=2.9e9),
        "100GbE": Network(latency=5e-6, bandwidth=11.7e9),
        "loopback": Network(latency=20e-6, bandwidth=2e9),
        "shared-memory": Network(latency=1e-6, bandwidth=10e9),
        "nvlink-like": Network(latency=2e-6, bandwidth=300e9),
        # One NIC for each GPU: 94 % of the line rate, as nccl-tests measures it between hosts.
        "infiniband-200g": Network(latency=2e-6, bandwidth=23.5e9, local_latency=1e-6, local_bandwidth=230e9),
        "infiniband-400g": Network(latency=2e-6, bandwidth=47e9, local_latency=1e-6, local_bandwidth=350e9),
        "infiniband-800g": Network(latency=2e-6, bandwidth=94e9, local_latency=1e-6, local_bandwidth=700e9),
    }
)
"""Networks with round figures that programs see, not advertised ones: less Ethernet's headers, with TCP's latency."""

NetworkLike: TypeAlias = Network | str | Callable[[int, int], Network] | None
"""A network, the name of one, a function from two ranks to their network, or None: all messages arrive at once."""

INSTANT = Network(0.0, math.inf)


def link_function(network: NetworkLike, world_size: int) -> Callable[[int, int], Network]:
    """Returns the function from two ranks to the network between them.

    Raises:
        LaunchError: the name is unknown, `network` is no network, or its hosts do not have `world_size` ranks.
    """
    if callable(network):
        return _checked(network)
    chosen = INSTANT if network is None else Network.named(network) if isinstance(network, str) else network
    if not isinstance(chosen, Network):
        raise LaunchError(f"network={network!r}: give a Network, the name of one, or a function from two ranks to one")
    if chosen.hosts is not None and sum(chosen.hosts) != world_size:
        raise LaunchError(
            f"hosts={list(chosen.hosts)} have {sum(chosen.hosts)} ranks, the simulation has {world_size}: make "
            "the numbers equal"
        )
    return chosen.between


def takes_no_time(network: NetworkLike) -> bool:
    """Whether all messages arrive at once."""
    chosen = Network.named(network) if isinstance(network, str) else network
    if chosen is None:
        return True
    if not isinstance(chosen, Network):
        return False
    local = chosen.hosts is None or (chosen.local_latency == 0 and chosen.local_bandwidth == math.inf)
    return chosen.latency == 0 and chosen.bandwidth == math.inf and chosen.overhead == 0 and local


def _checked(network: Callable[[int, int], Network]) -> Callable[[int, int], Network]:
    """Wraps a user's function: raises LaunchError if it returns no network."""

    def between(src: int, dst: int) -> Network:
        found = network(src, dst)
        if not isinstance(found, Network):
            raise LaunchError(f"the network from rank {src} to {dst} is {found!r}: let the function return a Network")
        return found

    return between


def host_numbers(network: NetworkLike, world_size: int) -> tuple[int, ...]:
    """Returns the number of each rank's host. Each rank has its own host if the network does not name hosts."""
    return (network._host_of if isinstance(network, Network) else ()) or tuple(range(world_size))
