"""Dissemination barrier: every rank hears of all others in the fewest rounds."""

from __future__ import annotations

from functools import lru_cache

from echelon.collectives.plans.plan import Plan, Recv, Round, Send


@lru_cache(maxsize=64)
def dissemination_barrier(num_ranks: int) -> Plan:
    """Blocks every rank until all have come: ceil(log2 p) rounds of empty messages (Hensgen, Finkel, Manber, 1988).

    In round k each rank signals the rank 2^k after it, which then knows of twice as many ranks as before.
    """
    rounds: list[list[Round]] = [[] for _ in range(num_ranks)]
    distance = 1
    while distance < num_ranks:
        for rank in range(num_ranks):
            # Without chunks: that the message comes is all that it says.
            rounds[rank].append((Send((rank + distance) % num_ranks, ()), Recv((rank - distance) % num_ranks, ())))
        distance *= 2
    return Plan("dissemination barrier", 0, tuple(map(tuple, rounds)))
