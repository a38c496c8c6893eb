"""Fused backwards for stages that cannot split their backward, and the order of gradient sums."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from echelon.pipeline.plan.action import Action, Overlapped, Step, actions_of
from echelon.pipeline.plan.cost import Costs
from echelon.pipeline.plan.schedule import Schedule


def exact_stages(schedule: Schedule) -> tuple[bool, ...]:
    """Returns for each stage whether its weight gradients are added up in the order of the microbatches.

    Sums of floats depend on their order. A stage whose B's and W's run in the order of the microbatches has, bit for
    bit, the gradients of one process that runs one microbatch after another. Any other stage differs by rounding.

    Args:
        schedule: a schedule of any kind.
    """
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
    """Returns whether all stages add up their gradients in the order of the microbatches; see `exact_stages`.

    Args:
        schedule: a schedule of any kind.
    """
    return all(exact_stages(schedule))


_Where = Literal["I", "W"]


def split_stages(schedule: Schedule) -> frozenset[int]:
    """Returns the stages that split their backward into I and W."""
    return frozenset(
        action.stage for order in schedule.orders for step in order for action in actions_of(step) if action.kind == "I"
    )


def fused(schedule: Schedule, stages: Collection[int], costs: Costs | None = None) -> Schedule:
    """Returns the schedule with one B instead of the I and the W of some stages.

    All B's take the places of the I's or all take the places of the W's: the variant with the shorter makespan. A
    variant that deadlocks is left out.

    Args:
        schedule: A schedule without problems.
        stages: Stages whose backward becomes a B.
        costs: Costs that the makespans are compared with.

    Raises:
        ScheduleError: costs for another number of stages.
    """
    concerned = frozenset(stages) & split_stages(schedule)
    if not concerned:
        return schedule
    # At the place of I, B releases the stage before as early as possible. It cannot deadlock there: it needs the same
    # input as I, and no step waits for a W. So `min` always has a candidate.
    places: tuple[_Where, ...] = ("I", "W")
    found = [_fused_at(schedule, concerned, place) for place in places]
    return min(
        (candidate for candidate in found if not candidate.problems),
        key=lambda candidate: candidate.simulate(costs).makespan,
    )


def _fused_at(schedule: Schedule, stages: Collection[int], place: _Where) -> Schedule:
    def again(step: Step) -> Step | None:
        if isinstance(step, Overlapped):
            backward = one(step.backward)
            return step.forward if backward is None else Overlapped(step.forward, backward)
        return one(step)

    def one(action: Action) -> Action | None:
        if action.stage not in stages or action.kind not in ("I", "W"):
            return action
        return action._replace(kind="B") if action.kind == place else None

    orders = tuple(tuple(step for step in map(again, order) if step is not None) for order in schedule.orders)
    return replace(schedule, orders=orders)
