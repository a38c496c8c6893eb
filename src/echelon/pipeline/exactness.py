"""Which stages add their weights' gradients up in the order of a loop over the microbatches.

Sums of floats depend on their order. A stage whose weights get their contributions in the order of the microbatches
has, bit for bit, the gradients of one process that runs one microbatch after another; any other differs by rounding.
"""

from __future__ import annotations

from echelon.pipeline.action import actions_of
from echelon.pipeline.schedule import Schedule


def exact_stages(schedule: Schedule) -> tuple[bool, ...]:
    """Returns for each stage whether its B's and W's, whichever it has, run in the order of the microbatches."""
    in_order = [True] * schedule.num_stages
    latest = [-1] * schedule.num_stages
    for order in schedule.orders:
        for step in order:
            for stage, kind, microbatch in actions_of(step):
                if kind in ("B", "W"):
                    in_order[stage] &= microbatch > latest[stage]
                    latest[stage] = microbatch
    return tuple(in_order)


def is_exact(schedule: Schedule) -> bool:
    """Returns whether all stages are exact."""
    return all(exact_stages(schedule))
