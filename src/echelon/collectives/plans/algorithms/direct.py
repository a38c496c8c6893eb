"""Direct gather and scatter: one rank talks to all others, in one round."""

from __future__ import annotations

from functools import lru_cache

from echelon.collectives.plans.algorithms.compose import mirrored
from echelon.collectives.plans.plan import Plan, Program, Recv, Send


@lru_cache(maxsize=256)
def direct_scatter(num_ranks: int, src: int) -> Plan:
    """Brings chunk r of rank `src` to every rank r: 1 round, n (p - 1) / p bytes sent by `src` in p - 1 messages."""
    rounds: list[Program] = [((Recv(src, (rank,)),),) for rank in range(num_ranks)]
    rounds[src] = (tuple(Send(rank, (rank,)) for rank in range(num_ranks) if rank != src),)
    return Plan("direct scatter", num_ranks, tuple(rounds))


@lru_cache(maxsize=256)
def direct_gather(num_ranks: int, dst: int) -> Plan:
    """Brings chunk r of every rank r to rank `dst`: 1 round, n (p - 1) / p bytes received by `dst`."""
    return mirrored("direct gather", direct_scatter(num_ranks, dst))
