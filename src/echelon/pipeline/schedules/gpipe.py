"""GPipe: all forwards, then all backwards (Huang et al., 2019, section 2.3).

3 ranks, 4 microbatches:

    rank 0  0F0 0F1 0F2 0F3                         0B0---- 0B1---- 0B2---- 0B3----
    rank 1      1F0 1F1 1F2 1F3             1B0---- 1B1---- 1B2---- 1B3----
    rank 2          2F0 2F1 2F2 2F3 2B0---- 2B1---- 2B2---- 2B3----
"""

from __future__ import annotations

from echelon.pipeline.plan.action import Action, loop
from echelon.pipeline.plan.schedule import Schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the GPipe schedule. Every rank holds all microbatches at once."""
    return Schedule(
        name="gpipe",
        num_microbatches=num_microbatches,
        placement=loop(num_ranks),
        orders=tuple(
            (
                *(Action(rank, "F", microbatch) for microbatch in range(num_microbatches)),
                *(Action(rank, "B", microbatch) for microbatch in range(num_microbatches)),
            )
            for rank in range(num_ranks)
        ),
    )
