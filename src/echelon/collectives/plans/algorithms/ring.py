"""Ring algorithms: every rank exchanges messages with its two neighbours only. The least bytes, the most rounds."""

from __future__ import annotations

from functools import lru_cache

from echelon.collectives.plans.algorithms.compose import joined
from echelon.collectives.plans.plan import Plan, Program, Recv, Reduce, Send


@lru_cache(maxsize=64)
def ring_reduce_scatter(num_ranks: int) -> Plan:
    """Leaves chunk r, combined over all ranks, on rank r: p - 1 rounds, n (p - 1) / p bytes sent by each rank.

    Every chunk travels once round the ring and is combined on each rank that it passes. So the order of additions is
    fixed.
    """
    return Plan("ring reduce-scatter", num_ranks, tuple(_scatter(rank, num_ranks) for rank in range(num_ranks)))


@lru_cache(maxsize=64)
def ring_all_gather(num_ranks: int) -> Plan:
    """Brings chunk r of every rank r to all ranks: p - 1 rounds, n (p - 1) / p bytes sent by each rank."""
    return Plan("ring all-gather", num_ranks, tuple(_gather(rank, num_ranks) for rank in range(num_ranks)))


@lru_cache(maxsize=64)
def ring_all_reduce(num_ranks: int) -> Plan:
    """Leaves all chunks combined on all ranks: 2 (p - 1) rounds, 2 n (p - 1) / p bytes sent by each rank.

    A ring reduce-scatter, then a ring all-gather (Patarasuk and Yuan, 2009). Each chunk's final value comes from one
    rank, so the results are bit-identical on all ranks.
    """
    return joined("ring all-reduce", ring_reduce_scatter(num_ranks), ring_all_gather(num_ranks))


def _scatter(rank: int, num_ranks: int) -> Program:
    to, source = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    # Each step sends the chunk that the step before combined. The last step combines chunk `rank`.
    return tuple(
        (Send(to, ((rank - 1 - step) % num_ranks,)), Reduce(source, ((rank - 2 - step) % num_ranks,)))
        for step in range(num_ranks - 1)
    )


def _gather(rank: int, num_ranks: int) -> Program:
    to, source = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    # Each step sends the chunk that the step before received, the first one the rank's own.
    return tuple(
        (Send(to, ((rank - step) % num_ranks,)), Recv(source, ((rank - 1 - step) % num_ranks,)))
        for step in range(num_ranks - 1)
    )
