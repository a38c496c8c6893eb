"""How many activations a rank holds, step by step, in units of `Costs.activation`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from echelon.pipeline.action import Action, Step, actions_of
from echelon.pipeline.cost import StageCosts
from echelon.trace import Time

if TYPE_CHECKING:
    from echelon.pipeline.schedule import Schedule


def peaks(schedule: Schedule, costs: StageCosts) -> tuple[Time, ...]:
    """Returns the most that each rank holds at once."""
    return tuple(max(levels(order, costs, schedule.forward_only), default=0) for order in schedule.orders)


def levels(order: Sequence[Step], costs: StageCosts, forward_only: bool = False) -> Iterator[Time]:
    """Yields what a rank holds during each step: from the start of F to the end of I, and a part until the end of W.

    A pair that runs as one holds the forward's activation while the backward's is still there. Forward only, nothing
    stays.
    """
    activation, kept, recomputed = costs.activation, costs.weight_activation, costs.recomputed_activation
    held: Time = 0
    for step in order:
        if forward_only:
            yield sum(activation[action.stage] for action in actions_of(step))
        elif type(step) is Action:
            stage, kind, _ = step
            if kind == "F":
                held += activation[stage]
                yield held
            elif kind == "B":
                yield held + recomputed[stage]
                held -= activation[stage]
            elif kind == "I":
                yield held + recomputed[stage]
                held -= activation[stage] - kept[stage]
            else:
                yield held
                held -= kept[stage]
        else:
            forward, backward = actions_of(step)
            held += activation[forward.stage]
            stage = backward.stage
            yield held + recomputed[stage]
            held -= activation[stage] - (kept[stage] if backward.kind == "I" else 0)
