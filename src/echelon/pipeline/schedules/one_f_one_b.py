"""1F1B: after the warm-up one forward, one backward (PipeDream-Flush; Narayanan et al., 2021, section 2.1).

3 ranks, 4 microbatches:

    rank 0
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.pipeline.action import Action
from echelon.pipeline.placement import loop
from echelon.pipeline.schedule import Schedule


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Makes the 1F1B schedule. Rank r holds at most num_ranks - r microbatches."""
    return Schedule(
        name="1f1b",
        num_microbatches=num_microbatches,
        placement=loop(num_ranks),
        orders=tuple(tuple(_order(rank, num_ranks, num_microbatches)) for rank in range(num_ranks)),
    )


def _order(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    warm_up = min(num_ranks - 1 - rank, num_microbatches)
    for microbatch in range(warm_up):
        yield Action(rank, "F", microbatch)
    for microbatch in range(warm_up, num_microbatches):
        yield Action(rank, "F", microbatch)
        yield Action(rank, "B", microbatch - warm_up)
    for microbatch in range(num_microbatches - warm_up, num_microbatches):
        yield Action(rank, "B", microbatch)
