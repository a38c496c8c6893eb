"""All-reduce over several hosts: inside each host first, so that little goes over the network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from echelon.collectives.algorithms.binomial import binomial_broadcast, binomial_reduce
from echelon.collectives.algorithms.compose import embedded
from echelon.collectives.algorithms.recursive_halving import (
    rabenseifner_all_reduce,
    recursive_doubling_all_gather,
    recursive_halving_reduce_scatter,
)
from echelon.collectives.plan import Numbers, Plan, Program


def hierarchical_all_reduce(hosts: Sequence[object]) -> Plan:
    """Leaves all chunks combined on all ranks; `hosts` has the host of each rank, by any name.

    With h hosts of k ranks each: 2 ceil(log2 k) + 2 ceil(log2 h) rounds. A reduce-scatter inside each host, then
    all-reduces of n / k bytes between the i-th ranks of all hosts, then an all-gather inside each host: each rank sends
    2 n (k - 1) / k bytes inside its host, and 2 (n / k) (h - 1) / h over the network.

    With hosts of different sizes, the first rank of each speaks for it: a binomial reduce, an all-reduce between the
    first ranks, a binomial broadcast; up to 2 ceil(log2 k) rounds of n bytes inside the largest host.
    """
    return _planned(tuple(map(list(dict.fromkeys(hosts)).index, hosts)))


@lru_cache(maxsize=64)
def _planned(hosts: tuple[int, ...]) -> Plan:
    members = [[rank for rank, host in enumerate(hosts) if host == number] for number in range(max(hosts) + 1)]
    is_even = len(set(map(len, members))) == 1
    num_speakers = len(members[0]) if is_even else 1
    # One share per speaker of a host, each of one chunk per host.
    shares = [
        tuple(range(first, first + len(members))) for first in range(0, num_speakers * len(members), len(members))
    ]
    programs: dict[int, Program] = dict.fromkeys(range(len(hosts)), ())

    def add(plan: Plan, ranks: Sequence[int], chunks: Sequence[Numbers]) -> None:
        for rank, program in embedded(plan, ranks, chunks).items():
            programs[rank] += program

    for ranks in members:
        add(recursive_halving_reduce_scatter(len(ranks)) if is_even else binomial_reduce(len(ranks), 0), ranks, shares)
    for speaker, share in enumerate(shares):
        across = [ranks[speaker] for ranks in members]
        add(rabenseifner_all_reduce(len(members)), across, [(chunk,) for chunk in share])
    for ranks in members:
        add(recursive_doubling_all_gather(len(ranks)) if is_even else binomial_broadcast(len(ranks), 0), ranks, shares)
    rounds = tuple(programs[rank] for rank in range(len(hosts)))
    return Plan("hierarchical all-reduce", num_speakers * len(members), rounds)
