"""All-gather and reduce-scatter over several hosts, in as many messages over the network as there are hosts to tell.

h is the number of hosts and k that of the ranks of each. Where hosts have different numbers of ranks, the first rank of
each speaks for it, and k is that of the largest.
"""

from __future__ import annotations

from functools import lru_cache

from echelon.collectives.algorithms.binomial import binomial_broadcast, binomial_reduce
from echelon.collectives.algorithms.binomial_scatter import binomial_gather, binomial_scatter
from echelon.collectives.algorithms.compose import Part, assembled
from echelon.collectives.algorithms.hosts import Hosts, is_even, members_of
from echelon.collectives.algorithms.recursive_halving import (
    recursive_doubling_all_gather,
    recursive_halving_reduce_scatter,
)
from echelon.collectives.plan import Numbers, Plan


@lru_cache(maxsize=64)
def hierarchical_all_gather(hosts: Hosts) -> Plan:
    """Brings chunk r of every rank r to all ranks: ceil(log2 h) + ceil(log2 k) rounds.

    All-gathers between the i-th ranks of all hosts, (h - 1) n / p bytes from each rank over the network, then inside
    each host, n (k - 1) / k bytes. With hosts of different sizes: a binomial gather, an all-gather between the first
    ranks, a binomial broadcast of all n bytes.
    """
    members = members_of(hosts)
    between = recursive_doubling_all_gather(len(members))
    if is_even(members):
        columns = tuple(zip(*members, strict=True))
        parts = [Part(between, column, _single(column)) for column in columns]
        parts += [Part(recursive_doubling_all_gather(len(ranks)), ranks, columns) for ranks in members]
    else:
        parts = [Part(binomial_gather(len(ranks), 0), ranks, _single(ranks)) for ranks in members]
        parts.append(Part(between, tuple(ranks[0] for ranks in members), members))
        everything = tuple(range(len(hosts)))
        parts += [Part(binomial_broadcast(len(ranks), 0), ranks, [everything]) for ranks in members]
    return assembled("hierarchical all-gather", len(hosts), len(hosts), parts)


@lru_cache(maxsize=64)
def hierarchical_reduce_scatter(hosts: Hosts) -> Plan:
    """Leaves chunk r, combined over all ranks, on rank r: ceil(log2 k) + ceil(log2 h) rounds.

    Reduce-scatters inside each host, n (k - 1) / k bytes from each rank, then between the i-th ranks of all hosts,
    (h - 1) n / p bytes over the network. With hosts of different sizes: a binomial reduce of all n bytes, a
    reduce-scatter between the first ranks, a binomial scatter.
    """
    members = members_of(hosts)
    between = recursive_halving_reduce_scatter(len(members))
    if is_even(members):
        columns = tuple(zip(*members, strict=True))
        parts = [Part(recursive_halving_reduce_scatter(len(ranks)), ranks, columns) for ranks in members]
        parts += [Part(between, column, _single(column)) for column in columns]
    else:
        everything = tuple(range(len(hosts)))
        parts = [Part(binomial_reduce(len(ranks), 0), ranks, [everything]) for ranks in members]
        parts.append(Part(between, tuple(ranks[0] for ranks in members), members))
        parts += [Part(binomial_scatter(len(ranks), 0), ranks, _single(ranks)) for ranks in members]
    return assembled("hierarchical reduce-scatter", len(hosts), len(hosts), parts)


def _single(ranks: Numbers) -> list[Numbers]:
    """Returns the chunks of ranks that have one each."""
    return [(rank,) for rank in ranks]
