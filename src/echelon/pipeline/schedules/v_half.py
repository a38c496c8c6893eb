"""V-Half: half of 1F1B's memory (Pipeline Parallelism with Controllable Memory; Qi et al., 2024).

2 ranks, 4 microbatches:

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 0F3 3W1 3F2 0I1 3I2 0W1 3W2 3F3 3I3 0I2 3W3 0I3 0W2 0W3
    rank 1      1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2W1 1F3 1W1 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3
"""

from __future__ import annotations

from echelon.pipeline.plan.action import vee
from echelon.pipeline.plan.cost import Costs
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.schedules.building_block import Block
from echelon.pipeline.search.list_scheduler import pull_forward
from echelon.pipeline.search.problem import problem
from echelon.pipeline.search.weight_placement import fill, skeleton_of, to_actions

_WINDOW = 4


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the V-Half schedule. A rank holds both chunks of (num_ranks + 2) // 2 microbatches.

    It is the building block with warm-up and drain pulled together as far as the memory allows, for F, I and W of equal
    time. The bubble is then about 3 num_ranks of these times.
    """
    # The rests keep the actions of different microbatches apart on every rank; an odd number of ranks needs fewer.
    block = Block(1, 2, 1, 2, rests=(0, 0, 1) if num_ranks % 2 else (0, 3, 1))
    placement = vee(num_ranks)
    # In chunks, of which a rank has two per microbatch.
    limits = [2 * ((num_ranks + 2) // 2)] * num_ranks
    equal = problem(Costs(1, 1, 1), placement, num_microbatches, limits)
    pulled = pull_forward(equal, skeleton_of(block.orders(num_ranks, num_microbatches)), _WINDOW)
    assert pulled is not None
    filled = fill(equal, pulled)
    assert filled is not None
    return Schedule("v-half", num_microbatches, placement, to_actions(filled.orders))
