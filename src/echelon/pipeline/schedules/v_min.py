"""V-Min: a third of 1F1B's memory (Pipeline Parallelism with Controllable Memory; Qi et al., 2024).

2 ranks, 4 microbatches:

    rank 0  0F0         3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2 0F3 0I2 0W2 3F3 3I3 3W3     0I3 0W3
    rank 1      1F0 2F0         2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 1F3 2F3 2W2 1W2 2I3 1I3 2W3 1W3
"""

from __future__ import annotations

from echelon.pipeline.plan.action import vee
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.schedules.building_block import Block


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the V-Min schedule. A rank holds both chunks of (num_ranks + 4) // 3 microbatches.

    If F, I and W take equally long, the bubble is 4 num_ranks - 5 of these times (one more if 3 divides num_ranks).
    """
    # Each hop takes one unit, the least possible. If 3 divides num_ranks, two actions would then fall on the same unit
    # of a rank, and rests of 2 units keep them apart.
    rest = 0 if num_ranks % 3 else 2
    return Schedule(
        name="v-min",
        num_microbatches=num_microbatches,
        placement=vee(num_ranks),
        orders=Block(1, 1, 1, 1, rests=(rest, 0, rest)).orders(num_ranks, num_microbatches),
    )
