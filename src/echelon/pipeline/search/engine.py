"""Entry point of the search for the schedule with the shortest span within a memory limit."""

from __future__ import annotations

from contextlib import suppress
from numbers import Real

from echelon.errors import ScheduleError
from echelon.pipeline.plan.action import loop, vee
from echelon.pipeline.plan.check import over_limit
from echelon.pipeline.plan.cost import Costs, check_costs
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.plan.simulate import play
from echelon.pipeline.search.problem import problem, rank_limits
from echelon.pipeline.search.search_placement import find
from echelon.pipeline.search.weight_placement import skeleton_of, to_actions
from echelon.timeline.timeline import Time


def search(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    memory_limit: Time | None = None,
    num_chunks: int | None = None,
) -> Schedule:
    """Searches for the schedule with the shortest span (`Timeline.span`) that fits a memory limit.

    The span is never longer than that of any named schedule for as many stages that fits the limit. The same input
    gives the same schedule.

    Args:
        costs: Costs of the stages.
        num_ranks: Number of ranks.
        num_microbatches: Number of microbatches of a step.
        memory_limit: Most activations of a rank at once, in microbatches. One microbatch counts its activations on all
            stages of the rank. None: no limit.
        num_chunks: Stages per rank. None: from the length of costs given per stage, else 1. With 2, stages are placed
            both round the ranks and on a V.

    Raises:
        InvalidArgument: `costs` is no Costs.
        ScheduleError: impossible sizes or limit, or costs for another number of stages.
    """
    check_costs(costs)
    # Limits become whole numbers, and infinity has none.
    if memory_limit == float("inf"):
        memory_limit = None
    _validate(num_ranks, num_microbatches, 1 if num_chunks is None else num_chunks, memory_limit)
    chunks = _chunks(costs, num_ranks) if num_chunks is None else num_chunks
    # Named schedules compete, so the result is never worse than one of them. Their skeletons are starts of the search
    # even if they do not fit the limit: W's are placed anew, and the limit decides where.
    named = _named(num_ranks, num_microbatches, chunks)
    candidates = [schedule for schedule in named if _fits(schedule, costs, memory_limit)]
    for placement in (loop(num_ranks, chunks), vee(num_ranks)) if chunks == 2 else (loop(num_ranks, chunks),):
        limits = rank_limits(costs, placement, num_microbatches, memory_limit)
        known = [skeleton_of(schedule.orders) for schedule in named if schedule.placement == placement]
        found = find(problem(costs, placement, num_microbatches, limits), known)
        if found is not None:
            candidates.append(Schedule("searched", num_microbatches, placement, to_actions(found.orders)))
    if not candidates:
        raise ScheduleError(
            f"memory_limit={memory_limit} leaves no room for a backward that recomputes: raise it by what "
            f"recomputed_activation adds"
        )
    # Named schedules come first in the list, and `min` takes the first of equals: no searched one without a gain.
    return min(candidates, key=lambda schedule: _times(schedule, costs))


def _named(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Schedule]:
    """Returns the named schedules that exist in this size."""
    # Imported here because `echelon.pipeline.schedules` imports `search` from this module.
    from echelon.pipeline.schedules.registry import build, names

    built = []
    for name in names():
        with suppress(ScheduleError):
            built.append(build(name, num_ranks, num_microbatches, num_chunks))
    return [schedule for schedule in built if not schedule.forward_only]


def _fits(schedule: Schedule, costs: Costs, memory_limit: Time | None) -> bool:
    limits = rank_limits(costs, schedule.placement, schedule.num_microbatches, memory_limit)
    return not over_limit(schedule, limits, costs)


def _times(schedule: Schedule, costs: Costs) -> tuple[Time, Time]:
    """Returns the span, and the makespan as tie-breaker."""
    starts, ends = play(
        schedule.orders, schedule.placement, schedule.num_microbatches, costs.per_stage(schedule.placement)
    )
    span = max(own_ends[-1] - own_starts[0] for own_starts, own_ends in zip(starts, ends, strict=True))
    return span, max(own_ends[-1] for own_ends in ends)


def _chunks(costs: Costs, num_ranks: int) -> int:
    """Returns the number of stages per rank, from the length of costs that are given per stage."""
    return max(1, (costs.num_stages or num_ranks) // num_ranks)


def _validate(num_ranks: int, num_microbatches: int, num_chunks: int, memory_limit: Time | None) -> None:
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ScheduleError(f"{name}={value!r}: give a whole number of at least 1, such as 4")
    if memory_limit is None:
        return
    if isinstance(memory_limit, bool) or not isinstance(memory_limit, Real) or not memory_limit >= 1:
        raise ScheduleError(
            f"memory_limit={memory_limit!r}: a rank must hold at least 1 microbatch; 1F1B needs as many as there are "
            f"ranks, here {num_ranks}"
        )
