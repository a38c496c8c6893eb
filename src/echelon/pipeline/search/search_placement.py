"""Search for the best orders of one placement: several methods in turn, until one reaches the lower bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import NamedTuple

from echelon.pipeline.search.list_scheduler import pull_forward
from echelon.pipeline.search.local_search import Orders, climb, replay, swap
from echelon.pipeline.search.problem import Problem, lower_bound
from echelon.pipeline.search.slots import fill_slots
from echelon.pipeline.search.warm_ups import Shape, WarmUps, warm_ups
from echelon.pipeline.search.weight_placement import Filled, Key, Skeleton, fill

# Factors of the costs of W and of transfers, the most helpful first. `Filler` looks only one gap ahead. With shorter W
# or free transfers it waits less, or runs more W early, and that is sometimes better in the end. The orders that it
# finds are then played with the true costs.
_COST_PERTURBATIONS = (
    ("4/5", "1"),
    ("9/10", "1/2"),
    ("4/5", "0"),
    ("1", "0"),
    ("9/10", "1"),
    ("11/10", "1/2"),
    ("1", "2"),
    ("4/5", "1/2"),
    ("9/10", "0"),
    ("11/10", "1"),
    ("5/4", "1"),
    ("1", "1/2"),
)


def pretences(problem: Problem) -> Iterator[Problem]:
    """Yields the problem with perturbed times of W and transfers."""
    for weight, transfer in _COST_PERTURBATIONS:
        yield replace(
            problem,
            backward_weight=_scaled(problem.backward_weight, Fraction(weight)),
            transfer=_scaled(problem.transfer, Fraction(transfer)),
        )


def _scaled(times: tuple[int, ...], part: Fraction) -> tuple[int, ...]:
    return tuple(int(time * part) for time in times)


# Budget of one method, as the number of actions that all of its tries place. It keeps the largest search in seconds. A
# count, unlike a time limit, gives the same schedule on every machine.
_ACTIONS = 2_500_000
_FEWEST_TRIES, _MOST_TRIES = 80, 3_000
_CLIMB_STARTS = 3
_PATIENCE_STEPS = 8
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
    for step in (search.slots, search.known, search.pretend, search.pull, search.wait_more, search.swap):
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

    def slots(self) -> None:
        """Tries warm-ups, and climbs from the best 3."""
        style = warm_ups(self._problem)
        if style is None:
            return
        scores: dict[tuple[Shape, bool], tuple[int, int]] = {}
        score = partial(self._score_slots, style, scores)
        # `backward_first` is for one stage per rank only.
        ways = (False, True) if self._problem.num_stages == self._problem.num_ranks else (False,)
        starts = [(shape, way) for way in ways for shape in style.starts()]
        ranked = sorted((score(way, shape) or self._never, shape, way) for shape, way in starts)
        for _, shape, way in ranked[:_CLIMB_STARTS]:
            climb(shape, partial(score, way))

    def known(self) -> None:
        """Plays the skeletons of named schedules."""
        for skeleton in self._known:
            self._consider(fill(self._problem, skeleton))

    def pretend(self) -> None:
        """Places W with perturbed costs, and plays the orders with the true costs."""
        # The best skeleton first: a large problem has tries for few skeletons.
        skeletons = [found.skeleton for found in self._finalists[:1]] + self._known
        for skeleton in skeletons[: self._tries // 40]:
            for pretence in islice(pretences(self._problem), self._tries // 10):
                filled = None if self.done else fill(pretence, skeleton)
                if filled is not None:
                    self._consider_orders(filled.orders)

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

    def wait_more(self) -> None:
        """Plays the best skeleton with several values of `patience`, up to the idle time of the best result."""
        if self.best is None:
            return
        skeleton, idle = self.best.skeleton, self.best.span - max(self._problem.work)
        for step in range(1, _PATIENCE_STEPS + 1):
            if not self.done:
                self._consider(fill(self._problem, skeleton, patience=idle * step // _PATIENCE_STEPS))

    def swap(self) -> None:
        """Swaps neighbouring steps in the finalists."""
        for found in list(self._finalists):
            if not self.done:
                self._consider_orders(swap(self._problem, found.orders, self._tries // _FINALISTS))

    @property
    def _never(self) -> tuple[int, int]:
        # Score of a warm-up that cannot run: worse than any span, and still comparable.
        return sum(self._problem.work) * self._problem.num_ranks * 10 + 1, 0

    def _score_slots(
        self, style: WarmUps, scores: dict[tuple[Shape, bool], tuple[int, int]], backward_first: bool, shape: Shape
    ) -> tuple[int, int] | None:
        # Many shapes repair to the same one, which is then played once.
        attempt = style.repaired(shape), backward_first
        if attempt not in scores:
            if len(scores) >= self._tries or self.done:
                return None
            filled = fill_slots(self._problem, style.forwards(attempt[0]), backward_first=backward_first)
            scores[attempt] = self._consider(filled) or self._never
        return scores[attempt]

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
