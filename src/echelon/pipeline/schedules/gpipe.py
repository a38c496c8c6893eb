"""GPipe: all forwards, then all backwards (Huang et al., 2019, section 2.3).

3 ranks, 4 microbatches:

    rank 0
"""

from __future__ import annotations

from echelon.pipeline.action import Action
from echelon.pipeline.placement import loop
from echelon.pipeline.schedule import Schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Makes the GPipe schedule. Every rank holds all microbatches at once."""
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
