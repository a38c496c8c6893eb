"""Common order of ZB-H1 and ZB-H2: forwards run ahead on early ranks, weight gradients lag on late ranks."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.pipeline.plan.action import Action, loop
from echelon.pipeline.plan.schedule import Schedule


def split_backward(name: str, num_ranks: int, num_microbatches: int, per_hop: int) -> Schedule:
    """Returns a 1F1B schedule with the backward split into I and W.

    A rank runs `per_hop` forwards ahead for each rank after it, and its W's lag `per_hop` behind its I's for each rank
    before it. So all ranks hold per_hop (num_ranks - 1) + 1 microbatches.
    """
    orders = (
        tuple(_order(rank, num_microbatches, per_hop * (num_ranks - 1 - rank), per_hop * rank))
        for rank in range(num_ranks)
    )
    return Schedule(name, num_microbatches, placement=loop(num_ranks), orders=tuple(orders))


def _order(rank: int, num_microbatches: int, ahead: int, lag: int) -> Iterator[Action]:
    # A W needs ahead + lag turns after its F. A few turns at the end may be empty; they add nothing.
    for turn in range(num_microbatches + max(ahead, lag) + ahead):
        if turn < num_microbatches:
            yield Action(rank, "F", turn)
        if 0 <= turn - ahead < num_microbatches:
            yield Action(rank, "I", turn - ahead)
        if 0 <= turn - ahead - lag < num_microbatches:
            yield Action(rank, "W", turn - ahead - lag)
