"""Time of collectives and messages on a cluster. Pure.

With NCCL: each algorithm (ring, tree) and protocol (LL, LL128, Simple) has a latency and a bandwidth. The fastest one
counts, as NCCL chooses. Latencies and ratios are those of NCCL's own tuning (NVIDIA/nccl at 5067397c,
src/graph/tuning.cc: measured by its authors). NVLS, CollNet and PAT are left out.

Without NCCL: a ring or a binary tree of messages, by their closed forms (latency alpha, seconds per byte beta).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from echelon.errors import EchelonError
from echelon.foresight.play.cluster import Cluster, Placement
from echelon.foresight.play.device import Curve, value_at
from echelon.foresight.trace import Collective, Message, Trace

_US = 1e-6


class Protocol(NamedTuple):
    """Latencies and ratios of one protocol of NCCL, in seconds."""

    tree_base: float
    ring_base: float
    tree_local: float
    ring_local: float
    tree_remote: float
    ring_remote: float
    ring_share: float
    """Share of the ring's bandwidth: LL sends a flag with 4 bytes of data, LL128 with 120 of 128."""
    tree_share: float


PROTOCOLS: Mapping[str, Protocol] = {
    "LL": Protocol(6.8 * _US, 6.6 * _US, 0.6 * _US, 0.6 * _US, 5.0 * _US, 2.7 * _US, 0.5, 1 / 3.8),
    "LL128": Protocol(14.0 * _US, 14.0 * _US, 1.25 * _US, 1.9 * _US, 8.5 * _US, 4.0 * _US, 0.92, 120 / 128),
    "Simple": Protocol(8.4 * _US, 8.4 * _US, 4.0 * _US, 3.4 * _US, 14.0 * _US, 14.0 * _US, 1.0, 0.92),
}
"""NCCL's baseLatencies, hwLatencies (NVLINK and NET) and the ratios of bandwidth in `ncclTopoTuneModel`."""

LL_MOST: Mapping[str, tuple[float, float, float]] = {
    "ampere": (87.7e9, 22.5e9, 19.0e9),
    "hopper": (141.0e9, 45.0e9, 35.0e9),
}
"""Most bytes per second of LL on one host, two and more. NCCL's llMaxBws."""

RING_PLATEAU = 1.4
"""Latency of a ring all-reduce by Simple between hosts, by the sum of its steps. NCCL's "plateau effect"."""

ONE_WAY = ("all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter")
KINDS = (*ONE_WAY, "all_reduce", "all_to_all", "barrier", "broadcast_rows")
"""Kinds of collectives that have a formula."""


_LIKE = {"broadcast": "all_gather", "broadcast_rows": "all_gather", "scatter": "all_gather", "gather": "all_gather"} | {
    "reduce": "reduce_scatter",
    "all_to_all": "all_gather",
}
"""Kinds of communication that take about as long as one that is measured: they move as many bytes."""


class Cost(NamedTuple):
    """Time of a collective, and the way that it takes."""

    seconds: float
    algorithm: str
    protocol: str
    """"" without NCCL."""


def collective_cost(cluster: Cluster, kind: str, placement: Placement, num_bytes: float) -> Cost:
    """Returns the time of a collective, from the arrival of its last member.

    Args:
        cluster: The cluster.
        kind: Kind of collective, one of `KINDS`.
        placement: The group's distribution over hosts.
        num_bytes: Bytes of the whole array: the output of an all-gather, the input of a reduce-scatter, the bytes that
            a rank gives into an all-to-all.

    Raises:
        EchelonError: a kind without formula.
    """
    return _cost(cluster, kind, placement, num_bytes)


@lru_cache(maxsize=100_000)
def _cost(cluster: Cluster, kind: str, placement: Placement, num_bytes: float) -> Cost:
    if kind not in KINDS:
        raise EchelonError(f"collective {kind!r} has no formula: kinds with one are {', '.join(sorted(KINDS))}")
    if placement.num_ranks == 1:
        return Cost(0.0, "copy", "")
    if kind == "barrier":
        kind, num_bytes = "all_reduce", 4
    if placement.num_hosts == 1 and (seconds := measured_seconds(cluster.links, kind, placement.num_ranks, num_bytes)):
        return Cost(seconds, "measured", "")
    if kind == "all_to_all":
        return _all_to_all(cluster, placement, num_bytes)
    if cluster.generation:
        return _nccl(cluster, kind, placement, num_bytes)
    return _plain(cluster, kind, placement, num_bytes)


def cost_of(cluster: Cluster, trace: Trace, rank: int, entry: Collective | Message) -> Cost:
    """Returns the time of a recorded rank's communication, from the arrival of its last member."""
    if isinstance(entry, Message):
        src, dst = (rank, entry.peer) if entry.is_send else (entry.peer, rank)
        return Cost(message_seconds(cluster, src, dst, entry.num_bytes), "message", "")
    return collective_cost(cluster, entry.kind, cluster.placement(trace.groups[entry.group].ranks), entry.num_bytes)


def message_seconds(cluster: Cluster, src: int, dst: int, num_bytes: float) -> float:
    """Returns the time of a message between two ranks, from the call of the later one."""
    is_local = cluster.host_of(src) == cluster.host_of(dst)
    if is_local and (seconds := measured_seconds(cluster.links, "message", 2, num_bytes)):
        return seconds
    if not cluster.generation:
        latency, bandwidth = _link(cluster, is_local)
        return latency + num_bytes / bandwidth
    simple = PROTOCOLS["Simple"]
    hops = simple.ring_local if is_local else simple.ring_remote + cluster.latency
    bandwidth = cluster.local_bandwidth if is_local else cluster.bandwidth
    # On rails of their own, data first goes to the neighbour on the host whose NIC is on the right rail.
    if not is_local and cluster.rail_of(src) != cluster.rail_of(dst):
        hops += simple.ring_local
    return simple.ring_base + hops + num_bytes / bandwidth


def measured_seconds(links: Mapping[str, Curve], kind: str, num_ranks: int, num_bytes: float) -> float:
    """Returns the time of a kind of communication that was measured with some numbers of ranks. 0 if it was not.

    Between two numbers of ranks, and beyond the largest, it is linear in their logarithm.
    """
    kind = _LIKE.get(kind, kind)
    curves = {int(name.rpartition(" ")[2]): curve for name, curve in links.items() if name.startswith(f"{kind} ")}
    if not curves:
        return 0.0
    known = sorted(curves)
    after = next((each for each in known if each >= num_ranks), known[-1])
    seconds = value_at(curves[after], max(1.0, num_bytes))
    if after == num_ranks or len(known) == 1:
        return seconds
    before = max(each for each in known if each < max(after, known[0] + 1))
    lower = value_at(curves[before], max(1.0, num_bytes))
    return lower + (seconds - lower) * math.log(num_ranks / before) / math.log(after / before)


def _nccl(cluster: Cluster, kind: str, placement: Placement, num_bytes: float) -> Cost:
    ranks, hosts, per_host = placement
    ring = cluster.ring_bandwidth(placement)
    limit = LL_MOST[cluster.generation][min(hosts, 3) - 1]
    both_ways = kind == "all_reduce"
    steps = (ranks - 1) * (2 if both_ways else 1)
    between = (hosts - 1) * (2 if both_ways else 1)
    found = []
    for name, protocol in PROTOCOLS.items():
        remote = (protocol.tree_remote if per_host == 1 else protocol.ring_remote) + cluster.latency
        bandwidth = ring * protocol.ring_share
        if name == "LL":
            bandwidth = min(bandwidth, limit)
        latency = (steps - between) * protocol.ring_local + between * remote
        if both_ways and name == "Simple" and hosts > 1:
            latency *= RING_PLATEAU
        moved = num_bytes if kind in ("broadcast", "reduce", "broadcast_rows") else num_bytes * steps / ranks
        found.append(Cost(protocol.ring_base + latency + moved / bandwidth, "ring", name))
        if both_ways:
            share = 7 / 9 if name == "LL128" and hosts == 1 else protocol.tree_share
            bandwidth = ring * share
            if name == "LL":
                bandwidth = min(bandwidth, limit)
            levels = math.ceil(math.log2(hosts))
            latency = 2 * (
                (ranks / hosts - 1) * protocol.tree_local + levels * (protocol.tree_remote + cluster.latency)
            )
            found.append(Cost(protocol.tree_base + latency + 2 * num_bytes / bandwidth, "tree", name))
    return min(found)


def _all_to_all(cluster: Cluster, placement: Placement, num_bytes: float) -> Cost:
    """An exchange with every other rank: inside the host and between hosts at once, each by its own links."""
    ranks, hosts, _ = placement
    local = ranks / hosts - 1
    remote = ranks - 1 - local
    each = num_bytes / ranks
    seconds = local * each / cluster.local_bandwidth
    if hosts > 1:
        seconds = max(seconds, remote * each / cluster.outward)
    if not cluster.generation:
        latency = cluster.latency if hosts > 1 else cluster.local_latency
        return Cost((ranks - 1) * latency + seconds, "pairwise", "")
    simple = PROTOCOLS["Simple"]
    latency = simple.ring_base + (simple.ring_remote + cluster.latency if hosts > 1 else simple.ring_local)
    return Cost(latency + seconds, "pairwise", "Simple")


def _plain(cluster: Cluster, kind: str, placement: Placement, num_bytes: float) -> Cost:
    ranks = placement.num_ranks
    latency, bandwidth = _link(cluster, placement.num_hosts == 1)
    # The ranks of a host share its link if their rings are one: neighbours on the same host use the local one.
    rounds = math.ceil(math.log2(ranks))
    ways = 2 if kind == "all_reduce" else 1
    if kind in ("broadcast", "reduce", "broadcast_rows"):
        tree = rounds * (latency + num_bytes / bandwidth)
        ring = (rounds + ranks - 1) * latency + 2 * num_bytes * (ranks - 1) / ranks / bandwidth
    else:
        ring = ways * (ranks - 1) * (latency + num_bytes / ranks / bandwidth)
        tree = ways * (rounds * latency + num_bytes * (ranks - 1) / ranks / bandwidth)
        if kind == "all_reduce":
            tree = rounds * (latency + num_bytes / bandwidth)
    return min(Cost(ring, "ring", ""), Cost(tree, "tree", ""))


def _link(cluster: Cluster, is_local: bool) -> tuple[float, float]:
    return (
        (cluster.local_latency, cluster.local_bandwidth)
        if is_local
        else (cluster.latency, cluster.bandwidth / cluster.oversubscription)
    )
