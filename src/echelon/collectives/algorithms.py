"""The algorithms, each a pure function from a number of ranks to a plan.

p is the number of ranks and n the bytes of the whole tensor.
"""

from __future__ import annotations

from functools import lru_cache

from echelon.collectives.plan import Plan, Recv, Reduce, Round, Send


@lru_cache(maxsize=64)
def ring_reduce_scatter(num_ranks: int) -> Plan:
    """Leaves chunk r, combined over all ranks, on rank r: p - 1 rounds, n (p - 1) / p bytes sent by each rank.

    Every chunk travels once round the ring and is combined on each rank it passes, so its order of additions is fixed.
    """
    return Plan("ring reduce-scatter", num_ranks, tuple(_scatter_rounds(rank, num_ranks) for rank in range(num_ranks)))


@lru_cache(maxsize=64)
def ring_all_gather(num_ranks: int) -> Plan:
    """Brings chunk r of every rank r to all ranks: p - 1 rounds, each rank sends all chunks but one."""
    return Plan("ring all-gather", num_ranks, tuple(_gather_rounds(rank, num_ranks) for rank in range(num_ranks)))


@lru_cache(maxsize=64)
def ring_all_reduce(num_ranks: int) -> Plan:
    """Leaves all chunks combined on all ranks: 2 (p - 1) rounds, 2 n (p - 1) / p bytes sent by each rank.

    A ring reduce-scatter, then a ring all-gather (Patarasuk and Yuan, 2009). Each chunk is combined on one rank only,
    so the results are bit-identical on all.
    """
    rounds = (_scatter_rounds(rank, num_ranks) + _gather_rounds(rank, num_ranks) for rank in range(num_ranks))
    return Plan("ring all-reduce", num_ranks, tuple(rounds))


@lru_cache(maxsize=256)
def binomial_broadcast(num_ranks: int, src: int) -> Plan:
    """Brings the one chunk of rank `src` to all ranks: ceil(log2 p) rounds, n (p - 1) bytes in all."""
    rounds: list[list[Round]] = [[] for _ in range(num_ranks)]
    reached = 1
    while reached < num_ranks:
        for relative in range(num_ranks):
            rank = (relative + src) % num_ranks
            step: Round = ()
            if relative < reached and relative + reached < num_ranks:
                step = (Send((rank + reached) % num_ranks, 0),)
            elif reached <= relative < 2 * reached:
                step = (Recv((rank - reached) % num_ranks, 0),)
            rounds[rank].append(step)
        reached *= 2
    return Plan("binomial broadcast", 1, tuple(map(tuple, rounds)))


@lru_cache(maxsize=64)
def dissemination_barrier(num_ranks: int) -> Plan:
    """Lets no rank go on before all have come: ceil(log2 p) rounds of empty messages (Hensgen, Finkel, Manber,
    1988)."""
    rounds: list[list[Round]] = [[] for _ in range(num_ranks)]
    distance = 1
    while distance < num_ranks:
        for rank in range(num_ranks):
            rounds[rank].append((Send((rank + distance) % num_ranks, 0), Recv((rank - distance) % num_ranks, 0)))
        distance *= 2
    return Plan("dissemination barrier", 1, tuple(map(tuple, rounds)))


def _scatter_rounds(rank: int, num_ranks: int) -> tuple[Round, ...]:
    to, source = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    return tuple(
        (Send(to, (rank - 1 - step) % num_ranks), Reduce(source, (rank - 2 - step) % num_ranks))
        for step in range(num_ranks - 1)
    )


def _gather_rounds(rank: int, num_ranks: int) -> tuple[Round, ...]:
    to, source = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    return tuple(
        (Send(to, (rank - step) % num_ranks), Recv(source, (rank - 1 - step) % num_ranks))
        for step in range(num_ranks - 1)
    )
