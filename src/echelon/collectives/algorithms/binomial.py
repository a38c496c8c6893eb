"""Binomial trees: whole tensors from one rank to all, and from all to one."""

from __future__ import annotations

from functools import lru_cache

from echelon.collectives.algorithms.compose import mirrored
from echelon.collectives.plan import Plan, Recv, Round, Send

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
