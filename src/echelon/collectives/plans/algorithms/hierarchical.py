"""Hierarchical algorithms for several hosts: most bytes stay inside a host, few cross the network.

h is the number of hosts and k the number of ranks of each host. If hosts have different numbers of ranks, one rank per
host communicates for it over the network, and k is that of the largest host.
"""

from __future__ import annotations

from functools import lru_cache

from echelon.collectives.plans.algorithms.binomial import (
    binomial_broadcast,
    binomial_gather,
    binomial_reduce,
    binomial_scatter,
)
from echelon.collectives.plans.algorithms.compose import Part, assembled, mirrored
from echelon.collectives.plans.algorithms.dissemination import dissemination_barrier
from echelon.collectives.plans.algorithms.hosts import Hosts, is_even, members_of
from echelon.collectives.plans.algorithms.recursive_doubling import recursive_doubling_all_reduce
from echelon.collectives.plans.algorithms.recursive_halving import (
    rabenseifner_all_reduce,
    recursive_doubling_all_gather,
    recursive_halving_reduce_scatter,
)
from echelon.collectives.plans.plan import Numbers, Plan


@lru_cache(maxsize=64)
def hierarchical_all_gather(hosts: Hosts) -> Plan:
    """Brings chunk r of every rank r to all ranks: ceil(log2 h) + ceil(log2 k) rounds.

    First all-gathers between the i-th ranks of all hosts: (h - 1) n / p bytes from each rank over the network. Then
    all-gathers inside each host: n (k - 1) / k bytes. With hosts of different sizes: a binomial gather, an all-gather
    between the first ranks, a binomial broadcast of all n bytes.
    """
    members = members_of(hosts)
    between = recursive_doubling_all_gather(len(members))
    # A column is the i-th ranks of all hosts.
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

    First reduce-scatters inside each host: n (k - 1) / k bytes from each rank. Then between the i-th ranks of all
    hosts: (h - 1) n / p bytes over the network. With hosts of different sizes: a binomial reduce of all n bytes, a
    reduce-scatter between the first ranks, a binomial scatter.
    """
    # Inside first: only the sums of a host cross the network, not the tensors of its ranks.
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
    # Chunk r belongs to rank r.
    return [(rank,) for rank in ranks]


_ALL = ((0,),)


@lru_cache(maxsize=256)
def hierarchical_broadcast(hosts: Hosts, src: int) -> Plan:
    """Brings the one chunk of rank `src` to all ranks: ceil(log2 h) + ceil(log2 k) rounds.

    n (h - 1) bytes over the network: a binomial broadcast between one rank of each host, then one inside each host.
    """
    members = members_of(hosts)
    # The root speaks for its own host: another rank would have to get the tensor first.
    speakers = tuple(src if src in ranks else ranks[0] for ranks in members)
    parts = [Part(binomial_broadcast(len(members), hosts[src]), speakers, _ALL)]
    for ranks, speaker in zip(members, speakers, strict=True):
        parts.append(Part(binomial_broadcast(len(ranks), ranks.index(speaker)), ranks, _ALL))
    return assembled("hierarchical broadcast", len(hosts), 1, parts)


@lru_cache(maxsize=256)
def hierarchical_reduce(hosts: Hosts, dst: int) -> Plan:
    """Combines the one chunk of all ranks on rank `dst`: ceil(log2 k) + ceil(log2 h) rounds.

    n (h - 1) bytes over the network: the trees of the broadcast from the leaves to the root.
    """
    return mirrored("hierarchical reduce", hierarchical_broadcast(hosts, dst), reduces=True)


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
    # On even hosts each rank takes its own share to the other hosts, so all ranks use the network at once.
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
    """Blocks every rank until all have come: ceil(log2 k) + ceil(log2 h) rounds of empty messages.

    Dissemination inside each host, then between the i-th ranks of all hosts. With hosts of different sizes: a binomial
    gather, dissemination between the first ranks, a binomial broadcast.
    """
    members = members_of(hosts)
    between = dissemination_barrier(len(members))
    if is_even(members):
        parts = [Part(dissemination_barrier(len(ranks)), ranks, ()) for ranks in members]
        parts += [Part(between, column, ()) for column in zip(*members, strict=True)]
    else:
        # Gather and broadcast of no chunks: messages that only say that a rank has come, or may go.
        parts = [Part(binomial_gather(len(ranks), 0), ranks, [()] * len(ranks)) for ranks in members]
        parts.append(Part(between, tuple(ranks[0] for ranks in members), ()))
        parts += [Part(binomial_broadcast(len(ranks), 0), ranks, [()]) for ranks in members]
    return assembled("hierarchical barrier", len(hosts), 0, parts)
