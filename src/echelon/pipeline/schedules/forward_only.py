"""Schedules for any placement of stages, in which every microbatch moves on as early as possible."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from echelon.pipeline.plan.action import Action, actions_of
from echelon.pipeline.plan.schedule import Schedule


def forward_only(placement: Sequence[int], num_microbatches: int) -> Schedule:
    """Returns a schedule without backwards for any placement of stages. It holds no activations.

    Time goes in steps of one forward. In each step, every rank runs its arrived microbatch that leaves the pipeline
    soonest: the latest stage, and of that stage the first microbatch. 3 ranks, 4 microbatches:

        rank 0  0F0 0F1 0F2 0F3
        rank 1      1F0 1F1 1F2 1F3
        rank 2          2F0 2F1 2F2 2F3
    """
    num_ranks, last = max(placement) + 1, len(placement) - 1
    # A heap per rank of (-stage, microbatch): the smallest entry is the latest stage's first microbatch.
    arrived: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    arrived[placement[0]] = [(0, microbatch) for microbatch in range(num_microbatches)]
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    while any(arrived):
        # All ranks choose before any result is handed on: an output arrives in the next step at the earliest.
        taken = [heappop(mine) for mine in arrived if mine]
        for minus_stage, microbatch in taken:
            stage = -minus_stage
            orders[placement[stage]].append(Action(stage, "F", microbatch))
            if stage < last:
                heappush(arrived[placement[stage + 1]], (minus_stage - 1, microbatch))
    return Schedule("forward-only", num_microbatches, tuple(placement), tuple(map(tuple, orders)), forward_only=True)


def forward_then_backward(placement: Sequence[int], num_microbatches: int) -> Schedule:
    """Returns a schedule that leaves a gap between forwards and backwards, in which a program can use the outputs.

    The backwards are the forwards of the stages in reverse, so every stage runs its microbatches in order.
    2 ranks, stages 0 1 1 0, 2 microbatches:

        rank 0  0F0 0F1                 3F0 3F1 3B0---- 3B1----                 0B0---- 0B1----
        rank 1          1F0 2F0 1F1 2F1                 2B0---- 1B0---- 2B1---- 1B1----
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
