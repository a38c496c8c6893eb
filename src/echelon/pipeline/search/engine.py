"""Searches for the schedule with the shortest span that fits a memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from numbers import Real

from echelon.errors import ScheduleError
from echelon.pipeline.check import over_limit
from echelon.pipeline.cost import Costs
from echelon.pipeline.placement import loop, vee
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.search.bound import lower_bound
from echelon.pipeline.search.climbing import climb
from echelon.pipeline.search.filling import Filled, Key, Skeleton, fill, skeleton_of
from echelon.pipeline.search.pretending import pretences, replay
from echelon.pipeline.search.problem import Problem, problem, rank_limits
from echelon.pipeline.search.pulling import pull_forward
from echelon.pipeline.search.slots import fill_slots
from echelon.pipeline.search.warm_ups import Shape, WarmUps, warm_ups
from echelon.pipeline.simulate import play
from echelon.trace import Time

# How many actions all tries of a climb may put together: what keeps the largest search in seconds.
_CLIMB_ACTIONS = 6_000_000
_CLIMB_STARTS = 3
_WINDOWS = (4, 16, 64)


def search(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    memory_limit: Time | None = None,
    num_chunks: int | None = None,
) -> Schedule:
    """Looks for the schedule with the shortest span (`Timeline.span`) that fits a memory limit.

    It is never longer than that of any named schedule for so many stages that fits the limit. The same input gives the
    same schedule.

    Args:
        costs: Of the stages.
        num_ranks: How many ranks take part.
        num_microbatches: How many microbatches a step has.
        memory_limit: The most that a rank may hold at once, in microbatches: one counts the activations of all the
            stages that the rank holds. None: no limit.
        num_chunks: Stages per rank. None: as many as costs given per stage say, else 1. With 2, stages are placed
            round the ranks and on a V.

    Raises:
        ScheduleError: sizes or a limit that cannot be, or costs that are not for so many stages.
    """
    _validate(num_ranks, num_microbatches, memory_limit)
    chunks = _chunks(costs, num_ranks) if num_chunks is None else num_chunks
    named = _named(num_ranks, num_microbatches, chunks)
    candidates = [schedule for schedule in named if _fits(schedule, costs, memory_limit)]
    for placement in (loop(num_ranks, chunks), vee(num_ranks)) if chunks == 2 else (loop(num_ranks, chunks),):
        limits = rank_limits(costs, placement, num_microbatches, memory_limit)
        known = [skeleton_of(schedule.orders) for schedule in named if schedule.placement == placement]
        found = _Search(problem(costs, placement, num_microbatches, limits), known).run()
        if found is not None:
            candidates.append(Schedule("searched", num_microbatches, placement, found.actions()))
    if not candidates:
        raise ScheduleError(
            f"memory_limit={memory_limit} leaves no room for a backward that recomputes: raise it by what "
            f"recomputed_activation adds"
        )
    return min(candidates, key=lambda schedule: _times(schedule, costs))


class _Search:
    """The search for one placement: tries one thing after another, and stops at the bound."""

    def __init__(self, problem: Problem, known: Sequence[Skeleton]) -> None:
        self._problem = problem
        self._known = [*known, _one_by_one(problem)]
        self._bound = lower_bound(problem)
        self._best: Filled | None = None

    @property
    def _done(self) -> bool:
        return self._best is not None and self._best.span <= self._bound

    def run(self) -> Filled | None:
        """Returns the best that was found."""
        starts = warm_ups(self._problem)
        if starts is not None:
            self._climb(starts)
        for skeleton in self._known:
            if not self._done:
                self._consider(fill(self._problem, skeleton))
        if not self._done:
            self._pull()
        if not self._done:
            self._wait_more()
        if not self._done and self._best is not None:
            self._pretend([self._best.skeleton, *self._known])
        return self._best

    def _consider(self, filled: Filled | None) -> tuple[int, int] | None:
        """Keeps the best; returns a score, lower is better."""
        if filled is None:
            return None
        if self._best is None or (filled.span, sum(filled.waits)) < (self._best.span, sum(self._best.waits)):
            self._best = filled
        return filled.span, sum(filled.waits)

    def _climb(self, style: WarmUps) -> None:
        size = 3 * self._problem.num_stages * self._problem.num_microbatches
        left = max(100, _CLIMB_ACTIONS // size)
        never = sum(self._problem.work) * self._problem.num_ranks * 10 + 1
        scores: dict[Shape, tuple[int, int]] = {}

        def score(shape: Shape) -> tuple[int, int] | None:
            nonlocal left
            shape = style.repaired(shape)
            if shape not in scores:
                if left <= 0 or self._done:
                    return None
                left -= 1
                filled = fill_slots(self._problem, style.forwards(shape))
                scores[shape] = self._consider(filled) or (never, never)
            return scores[shape]

        starts = style.starts()
        ranked = sorted((score(start) or (never, never), start) for start in starts)
        for _, start in ranked[:_CLIMB_STARTS]:
            climb(start, score)

    def _pull(self) -> None:
        for skeleton in ([self._best.skeleton] if self._best else []) + self._known:
            for window in _WINDOWS:
                current: Skeleton | None = skeleton
                for _ in range(2):
                    current = pull_forward(self._problem, current, window) if current else None
                    if current is not None and not self._done:
                        self._consider(fill(self._problem, current))

    def _wait_more(self) -> None:
        """Plays the best skeleton with other measures of how long a rank may wait."""
        if self._best is None:
            return
        skeleton, longest = self._best.skeleton, max(self._best.waits)
        for eighths in range(1, 9):
            if not self._done:
                self._consider(fill(self._problem, skeleton, patience=longest * eighths // 8))

    def _pretend(self, skeletons: Sequence[Skeleton]) -> None:
        for pretence in pretences(self._problem):
            for skeleton in skeletons:
                filled = fill(pretence, skeleton)
                if filled is not None and not self._done:
                    self._consider(replay(self._problem, filled.orders))


def _named(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Schedule]:
    """The named schedules that exist in this size."""
    # schedules.search is `search`: at the top, either of the two modules would need the other one to be there first.
    from echelon.pipeline.schedules.registry import build, names

    built = []
    for name in names():
        with suppress(ScheduleError):
            built.append(build(name, num_ranks, num_microbatches, num_chunks))
    return [schedule for schedule in built if not schedule.forward_only]


def _fits(schedule: Schedule, costs: Costs, memory_limit: Time | None) -> bool:
    limits = rank_limits(costs, schedule.placement, schedule.num_microbatches, memory_limit)
    return not over_limit(schedule, limits, costs)


def _one_by_one(problem: Problem) -> Skeleton:
    """One microbatch after another: it fits if anything does."""
    skeleton: list[list[Key]] = []
    for rank in range(problem.num_ranks):
        stages, own = problem.stages_of(rank), []
        for microbatch in range(problem.num_microbatches):
            own += [("F", stage, microbatch) for stage in stages]
            own += [("I", stage, microbatch) for stage in reversed(stages)]
        skeleton.append(own)
    return skeleton


def _times(schedule: Schedule, costs: Costs) -> tuple[Time, Time]:
    """The span, and the makespan to settle a draw."""
    starts, ends = play(
        schedule.orders, schedule.placement, schedule.num_microbatches, costs.per_stage(schedule.placement)
    )
    span = max(own_ends[-1] - own_starts[0] for own_starts, own_ends in zip(starts, ends, strict=True))
    return span, max(own_ends[-1] for own_ends in ends)


def _chunks(costs: Costs, num_ranks: int) -> int:
    """Stages per rank, as the lengths of costs say that are given per stage."""
    for item in fields(costs):
        value = getattr(costs, item.name)
        if isinstance(value, tuple):
            stages = len(value) + (item.name == "transfer")
            return max(1, stages // num_ranks)
    return 1


def _validate(num_ranks: int, num_microbatches: int, memory_limit: Time | None) -> None:
    for name, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ScheduleError(f"{name}={value!r}: give a whole number of at least 1, such as 4")
    if memory_limit is None:
        return
    if isinstance(memory_limit, bool) or not isinstance(memory_limit, Real) or not memory_limit >= 1:
        raise ScheduleError(
            f"memory_limit={memory_limit!r}: a rank must hold at least 1 microbatch; 1F1B needs as many as there are "
            f"ranks, here {num_ranks}"
        )
