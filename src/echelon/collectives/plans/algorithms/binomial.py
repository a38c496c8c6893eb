"""Binomial trees: whole tensors from one rank to all, and from all to one."""

from __future__ import annotations

from functools import lru_cache

from echelon.collectives.plans.algorithms.compose import joined, mirrored
from echelon.collectives.plans.algorithms.ring import ring_all_gather
from echelon.collectives.plans.plan import Plan, Recv, Round, Send

# Binomial trees whose messages halve: parts of a tensor from one rank to all, and from all to one.


@lru_cache(maxsize=256)
def binomial_scatter(num_ranks: int, src: int) -> Plan:
    """Brings chunk r of rank `src` to every rank r: ceil(log2 p) rounds, n (p - 1) / p bytes sent by `src`.

    Each rank that has several chunks hands the farther half on, with what its receiver is to hand on.
    """
    rounds: list[list[Round]] = [[] for _ in range(num_ranks)]
    half = 1 << (num_ranks - 1).bit_length()
    while half > 1:
        half //= 2
        steps: dict[int, Round] = {}
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

    The scatter's tree, walked from the leaves to the root.
    """
    return mirrored("binomial gather", binomial_scatter(num_ranks, dst))


@lru_cache(maxsize=256)
def scatter_all_gather_broadcast(num_ranks: int, src: int) -> Plan:
    """Brings all chunks of rank `src` to all ranks: ceil(log2 p) + p - 1 rounds, about 2 n bytes sent by `src`.

    A binomial scatter, then a ring all-gather (Barnett and others, 1994): for large tensors, as no rank sends the whole
    of it log2 p times.
    """
    return joined("scatter + all-gather broadcast", binomial_scatter(num_ranks, src), ring_all_gather(num_ranks))


_ALL = (0,)


@lru_cache(maxsize=256)
def binomial_broadcast(num_ranks: int, src: int) -> Plan:
    """Brings the one chunk of rank `src` to all ranks: ceil(log2 p) rounds, n (p - 1) bytes in all.

    In every round each rank that has it sends it to one that has not (Thakur, Rabenseifner and Gropp, 2005).
    """
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

    The broadcast's tree, walked from the leaves to the root.
    """
    return mirrored("binomial reduce", binomial_broadcast(num_ranks, dst), reduces=True)
