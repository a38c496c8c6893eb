"""1F1B: after the warm-up one forward, one backward (PipeDream-Flush; Narayanan et al., 2021, section 2.1).

3 ranks, 4 microbatches:

    rank 0  0F0 0F1 0F2                 0B0---- 0F3 0B1----     0B2----     0B3----
    rank 1      1F0 1F1         1B0---- 1F2 1B1---- 1F3 1B2----     1B3----
    rank 2          2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3----
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.pipeline.plan.action import Action, loop
from echelon.pipeline.plan.schedule import Schedule


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the 1F1B schedule. Rank r holds at most num_ranks - r microbatches."""
    return Schedule(
        name="1f1b",
        num_microbatches=num_microbatches,
        placement=loop(num_ranks),
        orders=tuple(tuple(_order(rank, num_ranks, num_microbatches)) for rank in range(num_ranks)),
    )


def _order(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    # One forward for each later rank: as many as fit into the time until the first gradient comes back.
    warm_up = min(num_ranks - 1 - rank, num_microbatches)
    for microbatch in range(warm_up):
        yield Action(rank, "F", microbatch)
    for microbatch in range(warm_up, num_microbatches):
        yield Action(rank, "F", microbatch)
        yield Action(rank, "B", microbatch - warm_up)
    for microbatch in range(num_microbatches - warm_up, num_microbatches):
        yield Action(rank, "B", microbatch)
