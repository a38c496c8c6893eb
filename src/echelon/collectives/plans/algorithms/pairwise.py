"""Pairwise all-to-all: each part goes straight to its rank. The least bytes, the most rounds."""

from __future__ import annotations

from functools import lru_cache

from echelon.collectives.plans.plan import Copy, Plan, Program, Recv, Send


@lru_cache(maxsize=64)
def pairwise_all_to_all(num_ranks: int) -> Plan:
    """Brings chunk s of rank r to rank s as its chunk p + r: p - 1 rounds, n (p - 1) / p bytes sent by each rank.

    In round k every rank sends to the k-th rank after it and receives from the k-th before it. So no rank receives from
    two ranks at once (Thakur, Rabenseifner and Gropp, 2005, section 4.5).
    """

    def program(rank: int) -> Program:
        pairs = (((rank + far) % num_ranks, (rank - far) % num_ranks) for far in range(1, num_ranks))
        exchanges = ((Send(dst, (dst,)), Recv(src, (num_ranks + src,))) for dst, src in pairs)
        # Results have chunks of their own, so no message overwrites a part that is still to be sent.
        return ((Copy(rank, num_ranks + rank),), *exchanges)

    return Plan("pairwise all-to-all", 2 * num_ranks, tuple(map(program, range(num_ranks))))
