"""All-reduce and barrier over several hosts: inside each host first, so that little goes over the network.

h is the number of hosts and k that of the ranks of each. Where hosts have different numbers of ranks, the first rank of
each speaks for it, and k is that of the largest.
"""

from __future__ import annotations

from functools import lru_cache

from echelon.collectives.algorithms.binomial import binomial_broadcast, binomial_reduce
from echelon.collectives.algorithms.binomial_scatter import binomial_gather
from echelon.collectives.algorithms.compose import Part, assembled
from echelon.collectives.algorithms.dissemination import dissemination_barrier
from echelon.collectives.algorithms.hosts import Hosts, is_even, members_of
from echelon.collectives.algorithms.recursive_doubling import recursive_doubling_all_reduce
from echelon.collectives.algorithms.recursive_halving import (
    rabenseifner_all_reduce,
    recursive_doubling_all_gather,
    recursive_halving_reduce_scatter,
)
from echelon.collectives.plan import Plan

_ALL = ((0,),)


@lru_cache(maxsize=64)
def hierarchical_all_reduce(hosts: Hosts) -> Plan:
    """Leaves all chunks combined on all ranks: 2 ceil(log2 k) + 2 ceil(log2 h) rounds.

    A reduce-scatter inside each host, then all-reduces of n / k bytes between the i-th ranks of all hosts, then an
    all-gather inside each host: each rank sends 2 n (k - 1) / k bytes inside its host, and 2 (n / k) (h - 1) / h over
    the network.

    With hosts of different sizes: a binomial reduce, an all-reduce between the first ranks, a binomial broadcast; n
    bytes in each of the 2 ceil(log2 k) rounds inside.
    """
    members = members_of(hosts)
    num_hosts, num_speakers = len(members), len(members[0]) if is_even(members) else 1
    # One share per speaker of a host, each of one chunk per host.
    shares = [tuple(range(first, first + num_hosts)) for first in range(0, num_speakers * num_hosts, num_hosts)]
    scatter, gather = (
        (recursive_halving_reduce_scatter, recursive_doubling_all_gather)
        if is_even(members)
        else (lambda size: binomial_reduce(size, 0), lambda size: binomial_broadcast(size, 0))
    )
    parts = [Part(scatter(len(ranks)), ranks, shares) for ranks in members]
    for speaker, share in enumerate(shares):
        column = tuple(ranks[speaker] for ranks in members)
        parts.append(Part(rabenseifner_all_reduce(num_hosts), column, [(chunk,) for chunk in share]))
    parts += [Part(gather(len(ranks)), ranks, shares) for ranks in members]
    return assembled("hierarchical all-reduce", len(hosts), num_speakers * num_hosts, parts)


@lru_cache(maxsize=64)
def hierarchical_doubling_all_reduce(hosts: Hosts) -> Plan:
    """Leaves the one chunk combined on all ranks: floor(log2 k) + floor(log2 h) rounds of n bytes. For small tensors.

    Recursive doubling inside each host, then between the i-th ranks of all hosts; 2 more rounds each for a k or h that
    is no power of two.

    With hosts of different sizes: a binomial reduce, recursive doubling between the first ranks, a binomial broadcast.
    """
    members = members_of(hosts)
    between = recursive_doubling_all_reduce(len(members))
    if is_even(members):
        parts = [Part(recursive_doubling_all_reduce(len(ranks)), ranks, _ALL) for ranks in members]
        parts += [Part(between, column, _ALL) for column in zip(*members, strict=True)]
    else:
        parts = [Part(binomial_reduce(len(ranks), 0), ranks, _ALL) for ranks in members]
        parts.append(Part(between, tuple(ranks[0] for ranks in members), _ALL))
        parts += [Part(binomial_broadcast(len(ranks), 0), ranks, _ALL) for ranks in members]
    return assembled("hierarchical doubling all-reduce", len(hosts), 1, parts)


@lru_cache(maxsize=64)
def hierarchical_barrier(hosts: Hosts) -> Plan:
    """Lets no rank go on before all have come: ceil(log2 k) + ceil(log2 h) rounds of empty messages.

    Dissemination inside each host, then between the i-th ranks of all hosts. With hosts of different sizes: a binomial
    gather, dissemination between the first ranks, a binomial broadcast.
    """
    members = members_of(hosts)
    between = dissemination_barrier(len(members))
    if is_even(members):
        parts = [Part(dissemination_barrier(len(ranks)), ranks, ()) for ranks in members]
        parts += [Part(between, column, ()) for column in zip(*members, strict=True)]
    else:
        parts = [Part(binomial_gather(len(ranks), 0), ranks, [()] * len(ranks)) for ranks in members]
        parts.append(Part(between, tuple(ranks[0] for ranks in members), ()))
        parts += [Part(binomial_broadcast(len(ranks), 0), ranks, [()]) for ranks in members]
    return assembled("hierarchical barrier", len(hosts), 0, parts)
