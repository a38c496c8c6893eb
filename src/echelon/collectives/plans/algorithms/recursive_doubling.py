"""Recursive doubling all-reduce: the fewest rounds, all bytes in each. For small tensors."""

from __future__ import annotations

from functools import lru_cache

from echelon.collectives.plans.plan import Plan, Program, Recv, Reduce, Round, Send

_ALL = (0,)


@lru_cache(maxsize=64)
def recursive_doubling_all_reduce(num_ranks: int) -> Plan:
    """Leaves the one chunk combined on all ranks: floor(log2 p) rounds, n bytes sent by each rank in each.

    In round k partners 2^k apart exchange their values (Thakur, Rabenseifner and Gropp, 2005, section 4.3). Both
    combine the lower rank's value with the higher rank's, in this order, so the results are bit-identical.

    If p is no power of two, there are 2 more rounds for the first 2 (p - 2^floor(log2 p)) ranks. Every even one of
    them sends its value to the next rank in the first round, and gets the result from it in the last.
    """
    # Of each folded pair only the odd rank takes part, so that the active ranks are a power of two.
    num_active = 1 << num_ranks.bit_length() - 1
    num_folded = num_ranks - num_active
    active = [2 * index + 1 if index < num_folded else index + num_folded for index in range(num_active)]
    exchanges = {rank: _exchanges(index, active) for index, rank in enumerate(active)}
    programs = []
    for rank in range(num_ranks):
        # Folded ranks have empty rounds during the exchanges, so the last round has one number on all ranks.
        rounds: Program = exchanges.get(rank, ((),) * (num_active.bit_length() - 1))
        if num_folded:
            before, after = _fold(rank) if rank < 2 * num_folded else ((), ())
            rounds = (before, *rounds, after)
        programs.append(rounds)
    return Plan("recursive doubling all-reduce", 1, tuple(programs))


def _exchanges(index: int, active: list[int]) -> Program:
    # The lower rank's value comes first on both sides, so both get the same bits.
    partners = (index ^ 1 << number for number in range(len(active).bit_length() - 1))
    return tuple(
        (Send(active[partner], _ALL), Reduce(active[partner], _ALL, received_first=partner < index))
        for partner in partners
    )


def _fold(rank: int) -> tuple[Round, Round]:
    """Returns the first and the last round of a rank of a folded pair: an even rank, or the rank that replaces it."""
    if rank % 2 == 0:
        return (Send(rank + 1, _ALL),), (Recv(rank + 1, _ALL),)
    return (Reduce(rank - 1, _ALL, received_first=True),), (Send(rank - 1, _ALL),)
