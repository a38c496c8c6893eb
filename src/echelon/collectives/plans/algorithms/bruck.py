"""Bruck's all-to-all: parts travel in hops of powers of two. The fewest rounds, more bytes. For small parts."""

from __future__ import annotations

from functools import lru_cache

from echelon.collectives.plans.plan import Copy, Plan, Program, Recv, Round, Send


@lru_cache(maxsize=64)
def bruck_all_to_all(num_ranks: int) -> Plan:
    """Brings chunk s of rank r to rank s as its chunk p + r: ceil(log2 p) rounds.

    A part for the j-th rank after its own travels in hops of the powers of two that add up to j. So in round k each
    rank sends the parts whose j has bit k: about n / 2 bytes per round (Bruck and others, 1997). On its way, a part
    with j ranks to go is stored in the slot in which the part from the j-th rank before will end.
    """

    def place(rank: int, ahead: int) -> int:
        return num_ranks + (rank - ahead) % num_ranks

    def program(rank: int) -> Program:
        # The inputs are copied to the slots of the results, so the rounds never overwrite an input.
        rounds: list[Round] = [tuple(Copy((rank + j) % num_ranks, place(rank, j)) for j in range(num_ranks))]
        distance = 1
        while distance < num_ranks:
            parts = tuple(place(rank, j) for j in range(num_ranks) if j & distance)
            to, source = (rank + distance) % num_ranks, (rank - distance) % num_ranks
            rounds.append((Send(to, parts), Recv(source, parts)))
            distance *= 2
        return tuple(rounds)

    return Plan("Bruck all-to-all", 2 * num_ranks, tuple(map(program, range(num_ranks))))
