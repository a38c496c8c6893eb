"""The algorithms, each a pure function from a number of ranks to a plan.

p is the number of ranks and n the bytes of the whole tensor.
"""

from __future__ import annotations

from functools import lru_cache

from echelon.collectives.plan import Copy, Plan, Recv, Reduce, Round, Send, Step


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


@lru_cache(maxsize=256)
def binomial_reduce(num_ranks: int, dst: int) -> Plan:
    """Combines the one chunk of all ranks on rank `dst`: ceil(log2 p) rounds, n (p - 1) bytes in all.

    The broadcast's tree, walked from the leaves to the root.
    """
    tree = binomial_broadcast(num_ranks, dst)
    rounds = (tuple(tuple(map(_reversed, steps)) for steps in reversed(program)) for program in tree.rounds)
    return Plan("binomial reduce", 1, tuple(rounds))


@lru_cache(maxsize=256)
def direct_gather(num_ranks: int, dst: int) -> Plan:
    """Brings chunk r of every rank r to rank `dst`: 1 round, each other rank sends its chunk."""
    receives: Round = tuple(Recv(rank, rank) for rank in range(num_ranks) if rank != dst)
    rounds: list[tuple[Round, ...]] = [((Send(dst, rank),),) for rank in range(num_ranks)]
    rounds[dst] = (receives,)
    return Plan("direct gather", num_ranks, tuple(rounds))


@lru_cache(maxsize=256)
def direct_scatter(num_ranks: int, src: int) -> Plan:
    """Brings chunk r of rank `src` to every rank r: 1 round, `src` sends each other rank its chunk."""
    sends: Round = tuple(Send(rank, rank) for rank in range(num_ranks) if rank != src)
    rounds: list[tuple[Round, ...]] = [((Recv(src, rank),),) for rank in range(num_ranks)]
    rounds[src] = (sends,)
    return Plan("direct scatter", num_ranks, tuple(rounds))


@lru_cache(maxsize=64)
def pairwise_all_to_all(num_ranks: int) -> Plan:
    """Brings chunk s of rank r to rank s as its chunk p + r: p - 1 rounds, each rank sends all chunks but its own.

    In round k every rank sends to the k-th after it and receives from the k-th before it, so nobody is flooded.
    """
    programs = (
        (
            (Copy(rank, num_ranks + rank),),
            *(
                (
                    Send((rank + distance) % num_ranks, (rank + distance) % num_ranks),
                    Recv((rank - distance) % num_ranks, num_ranks + (rank - distance) % num_ranks),
                )
                for distance in range(1, num_ranks)
            ),
        )
        for rank in range(num_ranks)
    )
    return Plan("pairwise all-to-all", 2 * num_ranks, tuple(programs))


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


def _reversed(step: Step) -> Step:
    return Reduce(step.peer, step.chunk) if isinstance(step, Send) else Send(step[0], step[1])


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
