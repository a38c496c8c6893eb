"""Time of collectives and messages on a cluster. Pure.

With NCCL: each algorithm (ring, tree) and protocol (LL, LL128, Simple) has a latency and a bandwidth. The fastest pair
is used, as NCCL chooses. Latencies and ratios are those of NCCL's own tuning (NVIDIA/nccl at 5067397c,
src/graph/tuning.cc: measured by its authors). NVLS, CollNet and PAT are left out.

Without NCCL: a ring or a binary tree of messages, by their closed forms (latency alpha, seconds per byte beta).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from echelon.errors import EchelonError
from echelon.foresight.play.cluster import Cluster, Placement
from echelon.foresight.play.device import Curve, value_at
from echelon.foresight.trace import Collective, Communication, Message

_US = 1e-6


class Protocol(NamedTuple):
    """Latencies, in seconds, and ratios of bandwidth of one protocol of NCCL."""

    tree_base: float
    ring_base: float
    tree_local: float
    ring_local: float
    tree_remote: float
    ring_remote: float
    ring_share: float
    """Share of the ring's bandwidth: LL sends a flag with every 4 bytes of data, LL128 with every 120 bytes."""
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
    "blackwell": (282.0e9, 90.0e9, 70.0e9),
}
"""Most bytes per second of LL on one host, on two, and on more. NCCL's llMaxBws."""

RING_PLATEAU = 1.4
"""Latency of a ring all-reduce by Simple between hosts, divided by the sum of its steps. NCCL's "plateau effect"."""

RING_CHANNELS = 24
"""Channels of a ring inside a host, on NVSwitch. Each passes an equal part of the ring's bandwidth."""

_MESSAGE_CHANNELS = 32
"""Channels for messages with all peers on a rank's host: `RING_CHANNELS`, rounded up to a power of two."""
_CHANNEL_BYTES = 16 << 20
"""Most bytes of a message inside a host that one channel passes while others are free."""
_CHANNEL_NETWORK = 14e9
"""Bytes per second between hosts for each of which NCCL gives a peer one channel. It gives at least two."""

ONE_WAY = ("all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter")
KINDS = (*ONE_WAY, "all_reduce", "all_to_all", "barrier", "broadcast_rows")
"""Kinds of collectives that have a formula."""
_ROOTED = frozenset({"gather", "scatter"})
"""Kinds that torch makes of NCCL's sends and receives, between the root and each other member."""

_LIKE = {"broadcast": "all_gather", "broadcast_rows": "all_gather", "scatter": "all_gather", "gather": "all_gather"} | {
    "reduce": "reduce_scatter",
    "all_to_all": "all_gather",
}
"""Measured kind for each kind that takes about as long, because it moves as many bytes."""


class Cost(NamedTuple):
    """Time of a collective or message, its algorithm, and its shares of links and multiprocessors meanwhile."""

    seconds: float
    algorithm: str
    protocol: str
    """"" without NCCL."""
    local: float = 0.0
    """Share that it takes of the bandwidth of each member's links inside its host: 0 to 1."""
    nic: float = 0.0
    """Share that it takes of each member's bandwidth to other hosts."""
    uplink: float = 0.0
    """Bytes that leave the host for each member on it, divided by the bytes that the member could send alone."""
    blocks: float = 1.0
    """Multiprocessors that it takes from kernels, divided by the number that a collective takes."""


@lru_cache(maxsize=100_000)
def collective_cost(cluster: Cluster, kind: str, placement: Placement, num_bytes: float) -> Cost:
    """Returns the time of a collective, from the arrival of its last member.

    Args:
        cluster: The cluster.
        kind: Kind of collective, one of `KINDS`.
        placement: The group's distribution over hosts.
        num_bytes: Bytes of the whole array: the output of an all-gather, the input of a reduce-scatter, a rank's input
            of an all-to-all.

    Raises:
        EchelonError: the kind has no formula.
    """
    if kind not in KINDS:
        raise EchelonError(f"collective {kind!r} has no formula: kinds with one are {', '.join(sorted(KINDS))}")
    if placement.num_ranks == 1:
        # A rank alone copies, which takes time on processors.
        return Cost(measured_seconds(cluster.links, kind, 1, num_bytes) if cluster.links else 0.0, "copy", "")
    if kind == "barrier":
        # torch's barrier on NCCL reduces one element.
        kind, num_bytes = "all_reduce", 4
    if placement.num_hosts == 1 and (seconds := measured_seconds(cluster.links, kind, placement.num_ranks, num_bytes)):
        return Cost(seconds, "measured", "")
    # The root of a gather moves as many bytes as each rank of an all-to-all.
    if kind == "all_to_all" or (cluster.generation and kind in _ROOTED):
        return _pairwise(cluster, placement, num_bytes, 1 if kind in _ROOTED else placement.per_host)
    if cluster.generation:
        return _nccl(cluster, kind, placement, num_bytes)
    cost = _plain(cluster, kind, placement, num_bytes)
    return cost._replace(
        seconds=cost.seconds + measured_seconds(cluster.overheads, kind, placement.num_ranks, num_bytes)
    )


def cost_of(cluster: Cluster, ranks: Sequence[int], rank: int, entry: Communication) -> Cost:
    """Returns the time of a rank's communication in a group of ranks, from the arrival of its last member."""
    if isinstance(entry, Message):
        src, dst = entry.ends(rank)
        # Lone messages of two ranks have a communicator of their own.
        return message_cost(cluster, src, dst, entry.num_bytes, (src, dst) if entry.batch < 0 else ranks)
    if cluster.generation and entry.kind in _ROOTED and entry.root >= 0:
        return _rooted(cluster, ranks, rank, entry)
    return collective_cost(cluster, entry.kind, cluster.placement(ranks), entry.num_bytes)


def message_cost(cluster: Cluster, src: int, dst: int, num_bytes: float, group: Sequence[int] = ()) -> Cost:
    """Returns the time of a message between two ranks, from the call of the later one.

    Args:
        cluster: The cluster.
        src, dst: The ranks.
        num_bytes: Its bytes.
        group: Ranks of the communicator. Empty: these two.
    """
    is_local = cluster.host_of(src) == cluster.host_of(dst)
    if is_local and (seconds := measured_seconds(cluster.links, "message", 2, num_bytes)):
        return Cost(seconds, "message", "")
    latency, bandwidth = _link(cluster, is_local)
    latency += measured_seconds(cluster.overheads, "message", 2, num_bytes)
    local, blocks = 0.0, 1.0
    if cluster.generation:
        simple = PROTOCOLS["Simple"]
        latency = simple.ring_base + (simple.ring_local if is_local else simple.ring_remote + cluster.latency)
        channels = _message_channels(cluster, cluster.placement(group or (src, dst)), num_bytes)
        blocks = min(1.0, channels / RING_CHANNELS)
        if is_local:
            bandwidth *= blocks
        # With rails, data first goes to the rank of the same host whose NIC is on the receiver's rail.
        elif cluster.nic_of(src, dst) != src:
            latency += simple.ring_local
            local = bandwidth / cluster.local_bandwidth
    moving = num_bytes / bandwidth
    seconds = latency + moving
    used = moving / seconds if seconds else 0.0
    if is_local:
        return Cost(seconds, "message", "", used * bandwidth / cluster.local_bandwidth, blocks=blocks)
    share = used * bandwidth / cluster.bandwidth
    return Cost(seconds, "message", "", used * local, share, share, blocks)


def _message_channels(cluster: Cluster, placement: Placement, num_bytes: float) -> int:
    """Returns the channels of a message, as NCCL chooses them (v2.18, src/enqueue.cc and graph/paths.cc).

    A communicator has the same number for every peer, so one that spans hosts has few. For 28 MB between 8 GPUs of a
    host, 4 channels make 0.75 ms on A100. Qi et al. (2024, table 9) measured 0.60 to 0.76 ms.
    """
    if placement.num_hosts > 1:
        needed = min(_MESSAGE_CHANNELS, max(2, math.ceil(cluster.bandwidth / _CHANNEL_NETWORK)))
        return 1 << (needed - 1).bit_length()
    channels = _MESSAGE_CHANNELS
    while channels > 1 and channels * placement.num_ranks > _MESSAGE_CHANNELS:
        channels //= 2
    while channels < _MESSAGE_CHANNELS and num_bytes / channels > _CHANNEL_BYTES:
        channels *= 2
    return channels


def measured_seconds(links: Mapping[str, Curve], kind: str, num_ranks: int, num_bytes: float) -> float:
    """Returns the time of communication from measurements with some numbers of ranks. 0 if its kind has none.

    Between two numbers of ranks, and beyond the largest, the time is linear in the logarithm of the number.
    """
    kind = _LIKE.get(kind, kind)
    curves = {int(name.rpartition(" ")[2]): curve for name, curve in links.items() if name.startswith(f"{kind} ")}
    if not curves:
        return 0.0
    known = sorted(curves)
    after = next((each for each in known if each >= num_ranks), known[-1])
    # A curve is a power law, which has no value at 0.
    seconds = value_at(curves[after], max(1.0, num_bytes))
    if after == num_ranks or num_ranks < known[0] or len(known) == 1:
        return seconds
    before = max(each for each in known if each < max(after, known[0] + 1))
    lower = value_at(curves[before], max(1.0, num_bytes))
    return lower + (seconds - lower) * math.log(num_ranks / before) / math.log(after / before)


def _nccl(cluster: Cluster, kind: str, placement: Placement, num_bytes: float) -> Cost:
    ranks, hosts, per_host, _ = placement
    ring = cluster.ring_bandwidth(placement)
    limit = LL_MOST[cluster.generation][min(hosts, 3) - 1]
    both_ways = kind == "all_reduce"
    steps = (ranks - 1) * (2 if both_ways else 1)
    between = (hosts - 1) * (2 if both_ways else 1)
    found = []
    for name, protocol in PROTOCOLS.items():
        # With one rank on each host latencies are fully exposed: NCCL takes that of the tree for rings, too.
        remote = (protocol.tree_remote if per_host == 1 else protocol.ring_remote) + cluster.latency
        latency = (steps - between) * protocol.ring_local + between * remote
        if both_ways and name == "Simple" and hosts > 1:
            latency *= RING_PLATEAU
        # Of broadcast and reduce the whole array passes between any two neighbours, of others all parts but one.
        moved = num_bytes if kind in ("broadcast", "reduce", "broadcast_rows") else num_bytes * steps / ranks
        ways = [("ring", protocol.ring_base + latency, moved, protocol.ring_share)]
        if both_ways:
            # The ratio inside of a host is that of `ncclTopoTuneModel`.
            share = 7 / 9 if name == "LL128" and hosts == 1 else protocol.tree_share
            levels = math.ceil(math.log2(hosts))
            latency = 2 * (
                (ranks / hosts - 1) * protocol.tree_local + levels * (protocol.tree_remote + cluster.latency)
            )
            ways.append(("tree", protocol.tree_base + latency, 2 * num_bytes, share))
        for algorithm, waiting, moved, share in ways:
            bandwidth = min(ring * share, limit) if name == "LL" else ring * share
            found.append(_Way(waiting + moved / bandwidth, algorithm, name, moved / share))
    way = min(found)
    rate = way.moved / way.seconds
    local = rate / cluster.local_bandwidth if hosts == 1 or per_host > 1 else 0.0
    nic = rate / (per_host * cluster.bandwidth) if hosts > 1 else 0.0
    return Cost(way.seconds, way.algorithm, way.protocol, local, nic, nic)


class _Way(NamedTuple):
    """Time of a collective by one algorithm and protocol."""

    seconds: float
    algorithm: str
    protocol: str
    moved: float
    """Bytes that pass between neighbours, with the protocol's overhead."""


def _rooted(cluster: Cluster, ranks: Sequence[int], rank: int, entry: Collective) -> Cost:
    """Returns the cost of a gather or scatter of NCCL, with the shares that one of its ranks takes."""
    hosts = [cluster.host_of(each) for each in ranks]
    own, of_root = cluster.host_of(rank), cluster.host_of(entry.root)
    near = hosts.count(of_root)
    placement = cluster.placement(ranks)._replace(per_host=near, most_per_host=near)
    cost = collective_cost(cluster, entry.kind, placement, entry.num_bytes)
    if rank == entry.root:
        return cost
    # Other members move their own part alone: on the links of the root's host, or by their NICs.
    local = cost.local / (near - 1) if own == of_root else 0.0
    nic = cost.nic / (len(ranks) - near) if own != of_root else 0.0
    return cost._replace(local=local, nic=nic, uplink=nic)


def _pairwise(cluster: Cluster, placement: Placement, num_bytes: float, at_once: int) -> Cost:
    """Returns the cost of an exchange with all ranks, inside the host and between hosts at once, on separate links.

    A rank on the host with the fewest members has the most to pass between hosts, one on that with the most inside.
    `at_once` ranks of a host share its uplink.
    """
    ranks, hosts, fewest, most = placement
    local, remote = (most - 1) * num_bytes / ranks, (ranks - fewest) * num_bytes / ranks
    seconds = local / cluster.local_bandwidth
    if hosts > 1:
        seconds = max(seconds, remote / min(cluster.bandwidth, cluster.uplink / at_once))
    if cluster.generation:
        simple = PROTOCOLS["Simple"]
        seconds += simple.ring_base + (simple.ring_remote + cluster.latency if hosts > 1 else simple.ring_local)
    else:
        seconds += (ranks - 1) * (cluster.latency if hosts > 1 else cluster.local_latency)
    if not seconds:
        return Cost(0.0, "pairwise", "")
    nic = remote / cluster.bandwidth / seconds if hosts > 1 else 0.0
    protocol = "Simple" if cluster.generation else ""
    return Cost(seconds, "pairwise", protocol, local / cluster.local_bandwidth / seconds, nic, nic)


def _plain(cluster: Cluster, kind: str, placement: Placement, num_bytes: float) -> Cost:
    ranks = placement.num_ranks
    is_local = placement.num_hosts == 1
    latency, bandwidth = _link(cluster, is_local)
    # Most neighbours are on the same host, and use local links: so the ranks of a host need not divide its link.
    rounds = math.ceil(math.log2(ranks))
    ways = 2 if kind == "all_reduce" else 1
    if kind in ("broadcast", "reduce", "broadcast_rows"):
        # A tree passes the whole array in each round.
        tree = rounds * latency, rounds * num_bytes
        # The array is scattered by a tree and gathered by a ring.
        ring = (rounds + ranks - 1) * latency, 2 * num_bytes * (ranks - 1) / ranks
    else:
        ring = ways * (ranks - 1) * latency, ways * (ranks - 1) * num_bytes / ranks
        tree = ways * rounds * latency, ways * num_bytes * (ranks - 1) / ranks
        if kind == "all_reduce":
            # Recursive doubling: ranks exchange the whole array in each round.
            tree = rounds * latency, rounds * num_bytes
    seconds, algorithm, moving = min(
        (waiting + moved / bandwidth, name, moved / bandwidth)
        for name, (waiting, moved) in (("ring", ring), ("tree", tree))
    )
    used = moving / seconds if seconds else 0.0
    if is_local:
        return Cost(seconds, algorithm, "", used)
    nic = used * bandwidth / cluster.bandwidth
    return Cost(seconds, algorithm, "", 0.0, nic, nic / placement.per_host)


def _link(cluster: Cluster, is_local: bool) -> tuple[float, float]:
    if is_local:
        return cluster.local_latency, cluster.local_bandwidth
    return cluster.latency, min(cluster.bandwidth, cluster.uplink)
