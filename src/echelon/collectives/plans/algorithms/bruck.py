"""All-to-all by Bruck: parts travel in steps of powers of two. The fewest rounds, more bytes. For small parts."""

from __future__ import annotations

from functools import lru_cache

from echelon.collectives.plans.plan import Copy, Plan, Program, Recv, Round, Send


@lru_cache(maxsize=64)
def bruck_all_to_all(num_ranks: int) -> Plan:
    """Brings chunk s of rank r to rank s as its chunk p + r: ceil(log2 p) rounds.

    A part for the rank j after its own travels in hops of the powers of two that j is the sum of, so in round k each
    rank sends those parts whose j has bit k: about n / 2 bytes per round (Bruck and others, 1997). On its way a part
    with j ahead of it stands where the part from the rank j behind will stand in the end.
    """

    def place(rank: int, ahead: int) -> int:
        return num_ranks + (rank - ahead) % num_ranks

    def program(rank: int) -> Program:
        rounds: list[Round] = [tuple(Copy((rank + j) % num_ranks, place(rank, j)) for j in range(num_ranks))]
        distance = 1
        while distance < num_ranks:
            parts = tuple(place(rank, j) for j in range(num_ranks) if j & distance)
            to, source = (rank + distance) % num_ranks, (rank - distance) % num_ranks
            rounds.append((Send(to, parts), Recv(source, parts)))
            distance *= 2
        return tuple(rounds)

    return Plan("Bruck all-to-all", 2 * num_ranks, tuple(map(program, range(num_ranks))))
