"""Searches one placement: tries one thing after another, and stops at the bound."""

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

# Betters a schedule by deciding where W go as if costs were a little different.
#
# The filler looks one gap ahead. When W seem shorter, or transfers free, it waits less or does more of them early, and
# that is sometimes better in the end. What comes out is played with the true costs.

# What W and transfers are taken to cost, as parts of what they do: the most helpful first.
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
    """Yields the problem with other times for W and transfers."""
    for weight, transfer in _COST_PERTURBATIONS:
        yield replace(
            problem,
            backward_weight=_scaled(problem.backward_weight, Fraction(weight)),
            transfer=_scaled(problem.transfer, Fraction(transfer)),
        )


def _scaled(times: tuple[int, ...], part: Fraction) -> tuple[int, ...]:
    return tuple(int(time * part) for time in times)


# How many actions all tries of a kind may put together. It keeps the largest search in seconds, and being a count and
# not a time, it gives the same schedule on every machine.
_ACTIONS = 2_500_000
_FEWEST_TRIES, _MOST_TRIES = 80, 3_000
_CLIMB_STARTS = 3
_PATIENCE_STEPS = 8
_WINDOWS = (4, 64, 16)
_FINALISTS = 6


class Found(NamedTuple):
    """Complete orders that fit the limits, and how long they take: lower is better."""

    score: tuple[int, int]
    orders: tuple[tuple[Key, ...], ...]

    @property
    def span(self) -> int:
        """The longest span of any rank."""
        return self.score[0]

    @property
    def skeleton(self) -> Skeleton:
        """The orders without W."""
        return tuple(tuple(key for key in order if key[0] != "W") for order in self.orders)


def find(problem: Problem, known: Sequence[Skeleton]) -> Found | None:
    """Returns the best orders for a problem, or None if nothing fits.

    Args:
        problem: What to schedule.
        known: Skeletons to begin with, of schedules that have a name.
    """
    search = _Search(problem, known)
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
        size = 3 * problem.num_stages * problem.num_microbatches
        self._tries = max(_FEWEST_TRIES, min(_MOST_TRIES, _ACTIONS // size))

    @property
    def best(self) -> Found | None:
        """The best so far; of equals, the first."""
        return self._finalists[0] if self._finalists else None

    @property
    def done(self) -> bool:
        """Whether nothing better is possible."""
        return self.best is not None and self.best.span <= self._bound

    def slots(self) -> None:
        """Tries warm-ups, and climbs from the best of them."""
        style = warm_ups(self._problem)
        if style is None:
            return
        scores: dict[tuple[Shape, bool], tuple[int, int]] = {}
        score = partial(self._score_slots, style, scores)
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
        """Decides where W go as if costs were others."""
        skeletons = [found.skeleton for found in self._finalists[:1]] + self._known
        for skeleton in skeletons[: self._tries // 40]:
            for pretence in islice(pretences(self._problem), self._tries // 10):
                filled = None if self.done else fill(pretence, skeleton)
                if filled is not None:
                    self._consider_orders(filled.orders)

    def pull(self) -> None:
        """Lets what is ready go first."""
        skeletons = [found.skeleton for found in self._finalists[:1]] + self._known
        for skeleton in skeletons[: self._tries // 40]:
            for window in _WINDOWS[-(1 + self._tries // 100) :]:
                current: Skeleton | None = skeleton
                for _ in range(2):
                    current = pull_forward(self._problem, current, window) if current and not self.done else None
                    if current is not None:
                        self._consider(fill(self._problem, current))

    def wait_more(self) -> None:
        """Plays the best skeleton with other measures of how long a rank may wait."""
        if self.best is None:
            return
        skeleton, idle = self.best.skeleton, self.best.span - max(self._problem.work)
        for step in range(1, _PATIENCE_STEPS + 1):
            if not self.done:
                self._consider(fill(self._problem, skeleton, patience=idle * step // _PATIENCE_STEPS))

    def swap(self) -> None:
        """Swaps steps in the best few."""
        for found in list(self._finalists):
            if not self.done:
                self._consider_orders(swap(self._problem, found.orders, self._tries // _FINALISTS))

    @property
    def _never(self) -> tuple[int, int]:
        return sum(self._problem.work) * self._problem.num_ranks * 10 + 1, 0

    def _score_slots(
        self, style: WarmUps, scores: dict[tuple[Shape, bool], tuple[int, int]], backward_first: bool, shape: Shape
    ) -> tuple[int, int] | None:
        attempt = style.repaired(shape), backward_first
        if attempt not in scores:
            if len(scores) >= self._tries or self.done:
                return None
            filled = fill_slots(self._problem, style.forwards(attempt[0]), backward_first=backward_first)
            scores[attempt] = self._consider(filled) or self._never
        return scores[attempt]

    def _consider(self, filled: Filled | None) -> tuple[int, int] | None:
        """Keeps it if it is among the best; returns its score."""
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
        if all(found.score != other.score for other in self._finalists):
            self._finalists = sorted([*self._finalists, found], key=lambda other: other.score)[:_FINALISTS]


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
