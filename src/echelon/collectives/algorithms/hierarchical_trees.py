"""Broadcast and reduce over several hosts: each host's bytes cross the network once.

h is the number of hosts and k that of the ranks of the largest.
"""

from __future__ import annotations

from functools import lru_cache

from echelon.collectives.algorithms.binomial import binomial_broadcast
from echelon.collectives.algorithms.compose import Part, assembled, mirrored
from echelon.collectives.algorithms.hosts import Hosts, members_of
from echelon.collectives.plan import Plan

_ALL = ((0,),)


@lru_cache(maxsize=256)
def hierarchical_broadcast(hosts: Hosts, src: int) -> Plan:
    """Brings the one chunk of rank `src` to all ranks: ceil(log2 h) + ceil(log2 k) rounds.

    n (h - 1) bytes over the network: a binomial broadcast between one rank of each host, of its own host `src` itself,
    then one inside each host.
    """
    members = members_of(hosts)
    speakers = tuple(src if src in ranks else ranks[0] for ranks in members)
    parts = [Part(binomial_broadcast(len(members), hosts[src]), speakers, _ALL)]
    for ranks, speaker in zip(members, speakers, strict=True):
        parts.append(Part(binomial_broadcast(len(ranks), ranks.index(speaker)), ranks, _ALL))
    return assembled("hierarchical broadcast", len(hosts), 1, parts)


@lru_cache(maxsize=256)
def hierarchical_reduce(hosts: Hosts, dst: int) -> Plan:
    """Combines the one chunk of all ranks on rank `dst`: ceil(log2 k) + ceil(log2 h) rounds.

    n (h - 1) bytes over the network: the broadcast's trees, walked from the leaves to the root.
    """
    return mirrored("hierarchical reduce", hierarchical_broadcast(hosts, dst), reduces=True)
