"""Search for the schedule with the shortest span within a memory limit, for one or several placements of stages.

For each placement, several methods run in turn until one reaches the lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from numbers import Rational, Real
from typing import NamedTuple

from echelon.arguments import is_count, refuse_others
from echelon.errors import ScheduleError
from echelon.pipeline.plan.action import loop, vee
from echelon.pipeline.plan.check import over_limit
from echelon.pipeline.plan.cost import Costs, check_costs
from echelon.pipeline.plan.schedule import Schedule, check_forwards
from echelon.pipeline.plan.simulate import play
from echelon.pipeline.search.greedy import Shape, WarmUps, schedule_greedily, warm_ups_of
from echelon.pipeline.search.list_scheduler import pull_forward
from echelon.pipeline.search.local_search import Orders, climb, replay, swap
from echelon.pipeline.search.problem import Problem, lower_bound, problem, rank_limits
from echelon.pipeline.search.weight_placement import Filled, Key, Skeleton, fill, skeleton_of, to_actions
from echelon.timeline.timeline import Time


@refuse_others(
    memory="memory_limit", chunks="num_chunks", num_stages=" give num_ranks and num_chunks, whose product it is"
)
def search(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    memory_limit: Time | None = None,
    num_chunks: int | None = None,
) -> Schedule:
    """Returns the schedule with the shortest span (`Timeline.span`) that a search finds within a memory limit.

    The span is never longer than that of any named schedule for as many stages that fits the limit. The same input
    gives the same schedule. Its timeline has Fractions if the costs are exact: print them by `float`.

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
    costs = check_costs(costs)
    # Limits become whole numbers, and infinity has none.
    if memory_limit == float("inf"):
        memory_limit = None
    _validate(num_ranks, num_microbatches, 1 if num_chunks is None else num_chunks, memory_limit)
    if memory_limit is not None and not isinstance(memory_limit, Rational):
        memory_limit = float(memory_limit)  # one of NumPy becomes no Fraction
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
            f"memory_limit={memory_limit} leaves no room for a backward: raise it by recomputed_activation, or until "
            "weight_activation fits"
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
        if not is_count(value, least=1):
            raise ScheduleError(f"{name}={value!r}: give a whole number of at least 1, such as 4")
    check_forwards(**sizes)
    if memory_limit is None:
        return
    if isinstance(memory_limit, bool) or not isinstance(memory_limit, Real) or not memory_limit >= 1:
        raise ScheduleError(
            f"memory_limit={memory_limit!r}: a rank must hold at least 1 microbatch; 1F1B needs as many as there are "
            f"ranks, here {num_ranks}"
        )


# Budget of one method, as the number of actions that all of its tries place. It keeps the largest search in seconds. A
# count, unlike a time limit, gives the same schedule on every machine.
_ACTIONS = 2_500_000
_FEWEST_TRIES, _MOST_TRIES = 80, 3_000
_CLIMB_STARTS = 3
_WINDOWS = (4, 64, 16)
_FINALISTS = 6


class Found(NamedTuple):
    """Complete orders that fit the limits, and their score (longest span, sum of waits). Lower is better."""

    score: tuple[int, int]
    orders: tuple[tuple[Key, ...], ...]

    @property
    def span(self) -> int:
        """Longest span of any rank."""
        return self.score[0]

    @property
    def skeleton(self) -> Skeleton:
        """The orders without W."""
        return tuple(tuple(key for key in order if key[0] != "W") for order in self.orders)


def find(problem: Problem, known: Sequence[Skeleton]) -> Found | None:
    """Returns the best orders for a problem. None if nothing fits.

    Args:
        problem: The problem to solve.
        known: Skeletons of the named schedules, as further starts.
    """
    search = _Search(problem, known)
    # The methods after `known` improve the finalists of the ones before them.
    for step in (search.greedy, search.known, search.pull, search.swap):
        step()
        if search.done:
            break
    return search.best


class _Search:
    def __init__(self, problem: Problem, known: Sequence[Skeleton]) -> None:
        self._problem = problem
        self._known = [*known, _one_by_one(problem)]
        self._bound = lower_bound(problem)
        self._finalists: list[Found] = []
        # Actions per try: F, I and W of each stage and microbatch.
        size = 3 * problem.num_stages * problem.num_microbatches
        self._tries = max(_FEWEST_TRIES, min(_MOST_TRIES, _ACTIONS // size))

    @property
    def best(self) -> Found | None:
        """Best result so far. The first of equals."""
        return self._finalists[0] if self._finalists else None

    @property
    def done(self) -> bool:
        """Whether the best result has reached the lower bound."""
        return self.best is not None and self.best.span <= self._bound

    def greedy(self) -> None:
        """Tries warm-ups, and climbs from the best 3."""
        style = warm_ups_of(self._problem)
        if style is None:
            return
        score = partial(self._score, style, {})
        ranked = sorted((score(shape) or self._never, shape) for shape in style.starts())
        for _, shape in ranked[:_CLIMB_STARTS]:
            climb(shape, score)

    def known(self) -> None:
        """Plays the skeletons of named schedules."""
        for skeleton in self._known:
            self._consider(fill(self._problem, skeleton))

    def pull(self) -> None:
        """Improves skeletons by the list scheduler, with several windows."""
        skeletons = [found.skeleton for found in self._finalists[:1]] + self._known
        for skeleton in skeletons[: self._tries // 40]:
            for window in _WINDOWS[-(1 + self._tries // 100) :]:
                current: Skeleton | None = skeleton
                for _ in range(2):
                    current = pull_forward(self._problem, current, window) if current and not self.done else None
                    if current is not None:
                        self._consider(fill(self._problem, current))

    def swap(self) -> None:
        """Swaps neighbouring steps in the finalists."""
        for found in list(self._finalists):
            if not self.done:
                self._consider_orders(swap(self._problem, found.orders, self._tries // _FINALISTS))

    @property
    def _never(self) -> tuple[int, int]:
        # Score of a warm-up that cannot run: worse than any span, and still comparable.
        return sum(self._problem.work) * self._problem.num_ranks * 10 + 1, 0

    def _score(self, style: WarmUps, scores: dict[Shape, tuple[int, int]], shape: Shape) -> tuple[int, int] | None:
        # Many shapes repair to the same one, which is then played once.
        shape = style.repaired(shape)
        if shape not in scores:
            if len(scores) >= self._tries or self.done:
                return None
            scores[shape] = self._consider(schedule_greedily(self._problem, style.forwards(shape))) or self._never
        return scores[shape]

    def _consider(self, filled: Filled | None) -> tuple[int, int] | None:
        """Keeps a result if it is among the best, and returns its score. None if there is no result."""
        if filled is None:
            return None
        found = Found((filled.span, sum(filled.waits)), filled.orders)
        self._keep(found)
        return found.score

    def _consider_orders(self, orders: Orders) -> None:
        played = replay(self._problem, orders)
        assert played is not None
        waits = sum(played.spans) - sum(self._problem.work)
        self._keep(Found((max(played.spans), waits), tuple(map(tuple, orders))))

    def _keep(self, found: Found) -> None:
        # One finalist per score, so that one order found by several methods does not fill the list.
        if all(found.score != other.score for other in self._finalists):
            self._finalists = sorted([*self._finalists, found], key=lambda other: other.score)[:_FINALISTS]


def _one_by_one(problem: Problem) -> Skeleton:
    """Returns the skeleton of one microbatch after another, which fits if any does."""
    skeleton: list[list[Key]] = []
    for rank in range(problem.num_ranks):
        stages, own = problem.stages_of(rank), []
        for microbatch in range(problem.num_microbatches):
            own += [("F", stage, microbatch) for stage in stages]
            own += [("I", stage, microbatch) for stage in reversed(stages)]
        skeleton.append(own)
    return skeleton
