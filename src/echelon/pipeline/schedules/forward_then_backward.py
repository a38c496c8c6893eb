"""All forwards, then all backwards, for any placement of stages: GPipe's order, with the backwards as its mirror image.

2 ranks, stages 0 1 1 0, 2 microbatches:

    rank 0  0F0 0F1                 3F0 3F1 3B0---- 3B1----                 0B0---- 0B1----
    rank 1          1F0 2F0 1F1 2F1                 2B0---- 1B0---- 2B1---- 1B1----
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.pipeline.plan.action import Action, actions_of
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.schedules.forward_only import forward_only


def forward_then_backward(placement: Sequence[int], num_microbatches: int) -> Schedule:
    """Returns a schedule that leaves a gap between forwards and backwards, in which a program can use the outputs.

    The backwards are the forwards of the stages in reverse, so every stage runs its microbatches in order.
    """
    last = len(placement) - 1
    forwards = forward_only(placement, num_microbatches)
    mirrored = forward_only(tuple(reversed(placement)), num_microbatches)
    backwards = [
        [Action(last - action.stage, "B", action.microbatch) for step in order for action in actions_of(step)]
        for order in mirrored.orders
    ]
    orders = tuple((*first, *second) for first, second in zip(forwards.orders, backwards, strict=True))
    return Schedule("forward-then-backward", num_microbatches, tuple(placement), orders)
