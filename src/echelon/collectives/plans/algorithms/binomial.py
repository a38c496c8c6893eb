"""Binomial trees: tensors, or parts of a tensor, from one rank to all and from all to one.

In trees for parts (scatter, gather), messages halve from round to round.
"""

from __future__ import annotations

from functools import lru_cache

from echelon.collectives.plans.algorithms.compose import joined, mirrored
from echelon.collectives.plans.algorithms.ring import ring_all_gather
from echelon.collectives.plans.plan import Plan, Recv, Round, Send


@lru_cache(maxsize=256)
def binomial_scatter(num_ranks: int, src: int) -> Plan:
    """Brings chunk r of rank `src` to every rank r: ceil(log2 p) rounds, n (p - 1) / p bytes sent by `src`.

    In each round, a rank with several chunks sends the farther half of them to the first rank of that half.
    """
    # Ranks are counted from `src`: relative rank 0 is the root. `half` rounds p up to a power of two.
    rounds: list[list[Round]] = [[] for _ in range(num_ranks)]
    half = 1 << (num_ranks - 1).bit_length()
    while half > 1:
        half //= 2
        steps: dict[int, Round] = {}
        # A holder is left out if there are no ranks behind it: p need be no power of two.
        for holder in range(0, num_ranks - half, 2 * half):
            first = holder + half
            chunks = tuple((relative + src) % num_ranks for relative in range(first, min(first + half, num_ranks)))
            steps[holder] = (Send((first + src) % num_ranks, chunks),)
            steps[first] = (Recv((holder + src) % num_ranks, chunks),)
        for relative in range(num_ranks):
            rounds[(relative + src) % num_ranks].append(steps.get(relative, ()))
    return Plan("binomial scatter", num_ranks, tuple(map(tuple, rounds)))


@lru_cache(maxsize=256)
def binomial_gather(num_ranks: int, dst: int) -> Plan:
    """Brings chunk r of every rank r to rank `dst`: ceil(log2 p) rounds, n (p - 1) / p bytes received by `dst`.

    It is the tree of the scatter from the leaves to the root.
    """
    return mirrored("binomial gather", binomial_scatter(num_ranks, dst))


@lru_cache(maxsize=256)
def scatter_all_gather_broadcast(num_ranks: int, src: int) -> Plan:
    """Brings all chunks of rank `src` to all ranks: ceil(log2 p) + p - 1 rounds, about 2 n bytes sent by `src`.

    A binomial scatter, then a ring all-gather (Barnett and others, 1994). For large tensors: no rank sends the whole
    tensor log2 p times.
    """
    return joined("scatter + all-gather broadcast", binomial_scatter(num_ranks, src), ring_all_gather(num_ranks))


_ALL = (0,)


@lru_cache(maxsize=256)
def binomial_broadcast(num_ranks: int, src: int) -> Plan:
    """Brings the one chunk of rank `src` to all ranks: ceil(log2 p) rounds, n (p - 1) bytes in all.

    In every round each rank that has the chunk sends it to a rank that does not (Thakur, Rabenseifner and Gropp, 2005).
    """
    # Relative ranks below `reached` have the chunk. Their number doubles in each round.
    rounds: list[list[Round]] = [[] for _ in range(num_ranks)]
    reached = 1
    while reached < num_ranks:
        for relative in range(num_ranks):
            rank = (relative + src) % num_ranks
            steps: Round = ()
            if relative < reached and relative + reached < num_ranks:
                steps = (Send((rank + reached) % num_ranks, _ALL),)
            elif reached <= relative < 2 * reached:
                steps = (Recv((rank - reached) % num_ranks, _ALL),)
            rounds[rank].append(steps)
        reached *= 2
    return Plan("binomial broadcast", 1, tuple(map(tuple, rounds)))


@lru_cache(maxsize=256)
def binomial_reduce(num_ranks: int, dst: int) -> Plan:
    """Combines the one chunk of all ranks on rank `dst`: ceil(log2 p) rounds, n (p - 1) bytes in all.

    It is the tree of the broadcast from the leaves to the root.
    """
    return mirrored("binomial reduce", binomial_broadcast(num_ranks, dst), reduces=True)
