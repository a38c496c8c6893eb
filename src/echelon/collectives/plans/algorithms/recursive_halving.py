"""Recursive halving reduce-scatter, its mirror, and the all-reduce of the two. For any number of ranks."""

from __future__ import annotations

from functools import lru_cache

from echelon.collectives.plans.algorithms.compose import joined, mirrored
from echelon.collectives.plans.plan import Plan, Reduce, Round, Send


@lru_cache(maxsize=64)
def recursive_halving_reduce_scatter(num_ranks: int) -> Plan:
    """Leaves chunk r, combined over all ranks, on rank r: ceil(log2 p) rounds, n (p - 1) / p bytes sent by each rank.

    Before a round, rank r holds partial sums of the `reach` chunks from r on. It sends the farther half of them,
    rounded down, to the rank at which that half begins, and receives equally many from the rank equally far before it.
    If p is a power of two, bytes and rounds are those of the textbook's exchange of halves. For any p they are the
    least possible (Träff, Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms, 2024).
    """
    rounds: list[list[Round]] = [[] for _ in range(num_ranks)]
    reach = num_ranks
    while reach > 1:
        distance = (reach + 1) // 2  # rounded up: the rank keeps the larger half
        for rank in range(num_ranks):
            given = tuple((rank + offset) % num_ranks for offset in range(distance, reach))
            kept = tuple((rank + offset) % num_ranks for offset in range(reach - distance))
            source = (rank - distance) % num_ranks
            rounds[rank].append((Send((rank + distance) % num_ranks, given), Reduce(source, kept)))
        reach = distance
    return Plan("recursive halving reduce-scatter", num_ranks, tuple(map(tuple, rounds)))


@lru_cache(maxsize=64)
def recursive_doubling_all_gather(num_ranks: int) -> Plan:
    """Brings chunk r of every rank r to all ranks: ceil(log2 p) rounds, n (p - 1) / p bytes sent by each rank.

    It is the recursive halving reduce-scatter in reverse. The rounds are those of Bruck and others (1997).
    """
    return mirrored("recursive doubling all-gather", recursive_halving_reduce_scatter(num_ranks))


@lru_cache(maxsize=64)
def rabenseifner_all_reduce(num_ranks: int) -> Plan:
    """Leaves all chunks combined on all ranks: 2 ceil(log2 p) rounds, 2 n (p - 1) / p bytes sent by each rank.

    As few bytes as the ring, in few rounds (Rabenseifner, 2004; here for any p without a fold). Each chunk is combined
    on one rank only, so the results are bit-identical on all ranks.
    """
    scatter, gather = recursive_halving_reduce_scatter(num_ranks), recursive_doubling_all_gather(num_ranks)
    return joined("Rabenseifner all-reduce", scatter, gather)
