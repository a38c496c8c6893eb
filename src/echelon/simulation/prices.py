"""Prices of plans on the network of a simulation: times, bytes sent, and the links that they keep busy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from echelon.backends.collective import Collective
from echelon.backends.operators import accumulation_dtype
from echelon.collectives.calls.chunks import even_sizes
from echelon.collectives.plans.plan import Plan
from echelon.simulation.network import Traffic
from echelon.simulation.playback import Framing, Link, Playback, Routes, Times, Waves, waves_of
from echelon.simulation.values import splits_of

Sizes: TypeAlias = tuple[int, ...]
"""Bytes of each chunk; see `Waves.num_bytes`."""

_MOST_PRICES = 64
"""Prices that are kept. One of a ring of 256 ranks takes 3 MB."""

FRAMING = {
    "all_reduce": Framing.PARTS,
    "reduce": Framing.PARTS,
    "reduce_scatter": Framing.PARTS,
    "broadcast": Framing.PARTS,
    "all_to_all": Framing.EXCHANGED,
}
"""Framing of a collective's messages. ROWS for the others."""


def sizes_of(collectives: Sequence[Collective | None], plan: Plan) -> Sizes:
    """Returns the bytes of the chunks of a plan. A rank that has not come counts as one that has."""
    calls = [collective for collective in collectives if collective is not None]
    num_ranks, call = len(collectives), calls[0]
    if call.kind == "barrier":
        return (0,) * plan.num_chunks
    if call.kind in ("scatter", "broadcast_rows"):
        root = collectives[call.root]
        assert root is not None
        return tuple(size * _row_bytes(root) for size in even_sizes(_shape(root)[0], plan.num_chunks))
    if call.kind in ("all_gather", "gather"):
        return tuple((collective or call).num_bytes for collective in collectives)
    row = _row_bytes(call)
    if call.kind == "all_to_all":
        received = (0,) * num_ranks
        return tuple(size * row for own in calls for size in (*splits_of(own, num_ranks), *received))
    assert call.dtype is not None
    # Reductions send the wide values in which they add.
    itemsize = call.dtype.itemsize if call.kind == "broadcast" else accumulation_dtype(call.dtype).itemsize
    if call.kind == "reduce_scatter":
        width = math.prod(_shape(call)[1:]) * itemsize
        return tuple(size * width for size in even_sizes(_shape(call)[0], num_ranks))
    return tuple(size * itemsize for size in even_sizes(math.prod(_shape(call)), plan.num_chunks))


def _shape(collective: Collective) -> Sequence[int]:
    assert collective.shape is not None
    return collective.shape


def _row_bytes(collective: Collective) -> int:
    assert collective.dtype is not None
    return math.prod(_shape(collective)[1:]) * collective.dtype.itemsize


class Price:
    """Price of a plan for chunks of some sizes, between some ranks of the world."""

    def __init__(self, traffic: Traffic, waves: Waves, routes: Routes, ranks: Sequence[int], sizes: Sizes) -> None:
        self.times_played = 0
        self._traffic = traffic
        self._ranks = ranks
        self._routes = routes
        self._num_bytes = waves.num_bytes(sizes)
        self._playback: Playback | None = None

    def play(self, arrivals: Sequence[float], free: Sequence[float]) -> Times:
        """Plays the plan; see `Playback.play`."""
        return self._played().play(arrivals, free)

    def use(self, times: Times, rank: int) -> None:
        """Keeps the link of a rank of the group busy for its messages."""
        self._traffic.reserve(self._ranks[rank], float(times.last_left[rank]), float(self._played().busy[rank]))

    def hold_up(self, times: Times, earlier: Times | None) -> None:
        """Lets messages, if their times were not known `earlier`, take computing time from their two ranks."""
        overhead, waves = self._routes.overhead * self._num_bytes, self._routes.waves
        is_known = np.isfinite(times.left) & (overhead > 0)
        if earlier is not None:
            is_known &= ~np.isfinite(earlier.left)
        for number in np.flatnonzero(is_known).tolist():
            seconds = float(overhead[number])
            self._traffic.hold_up_at(float(times.left[number]), self._ranks[waves.src[number]], seconds)
            self._traffic.hold_up_at(float(times.arrives[number]), self._ranks[waves.dst[number]], seconds)

    def bytes_sent(self) -> dict[tuple[int, int], int]:
        """Returns the bytes between ranks of the world, each time that the plan is played."""
        sent = self._routes.traffic(self._num_bytes)
        return {(self._ranks[src], self._ranks[dst]): total for (src, dst), total in sent.items()}

    def _played(self) -> Playback:
        if self._playback is None:
            self._playback = Playback(self._routes, self._num_bytes)
        return self._playback


class Prices:
    """Prices of all plans of one simulation, with a cache."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        # Plans by identity, which they keep as long as they are here: to hash one takes longer than to play it.
        self._waves: dict[tuple[int, Framing], tuple[Plan, Waves]] = {}
        self._routes: dict[tuple[int, Framing, tuple[int, ...]], Routes] = {}
        self._prices: dict[tuple[int, Framing, tuple[int, ...], Sizes], Price] = {}
        self._sent: Counter[tuple[int, int]] = Counter()

    def waves(self, plan: Plan, framing: Framing) -> Waves:
        """Returns the waves of a plan."""
        found = self._waves.get((id(plan), framing))
        if found is None:
            found = self._waves[id(plan), framing] = plan, waves_of(plan, framing)
        return found[1]

    def of(self, plan: Plan, framing: Framing, ranks: tuple[int, ...], sizes: Sizes) -> Price:
        """Returns the price of a plan."""
        key = id(plan), framing, ranks, sizes
        price = self._prices.get(key)
        if price is None:
            if len(self._prices) >= _MOST_PRICES:
                self._settle()
            waves = self.waves(plan, framing)
            routes = self._routes.get(key[:3])
            if routes is None:
                routes = self._routes[key[:3]] = Routes(waves, self._link_between(ranks))
            price = self._prices[key] = Price(self._traffic, waves, routes, ranks, sizes)
        return price

    def bytes_sent(self) -> Counter[tuple[int, int]]:
        """Returns the bytes that all plans have sent, by (sender, receiver)."""
        self._settle()
        return self._sent

    def _settle(self) -> None:
        """Adds up the bytes of all plans that were played, and forgets the prices."""
        for price in self._prices.values():
            if price.times_played:
                for pair, total in price.bytes_sent().items():
                    self._sent[pair] += price.times_played * total
        self._prices.clear()
        self._routes.clear()

    def _link_between(self, ranks: Sequence[int]) -> Callable[[int, int], Link]:
        def link(src: int, dst: int) -> Link:
            network = self._traffic.link(ranks[src], ranks[dst])
            return Link(network.latency, network.bandwidth, network.overhead)

        return link
