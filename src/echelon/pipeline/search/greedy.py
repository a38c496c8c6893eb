"""Greedy scheduler: warm-up forwards of many shapes, then by turns one backward and one forward on every rank.

A rank with several stages takes the stage nearest to the end of the microbatch's way whose input is known: the last
stage for a forward, the first for a backward. That frees memory soonest. A rank without room for a forward skips
its turn.

A shape of warm-up says how many forwards each rank starts with. With one stage per rank it is one row of numbers. On a
V it has two rows: forwards of a rank's first stage, then pairs of forwards of its second and first stage. One more
forward of the second stage ends the warm-up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from echelon.pipeline.plan.action import Kind, loop, vee
from echelon.pipeline.search.problem import Problem
from echelon.pipeline.search.weight_placement import Filled, Filler


def schedule_greedily(problem: Problem, warm_ups: Sequence[Sequence[int]]) -> Filled | None:
    """Returns a schedule that starts with the warm-ups. None if they do not fit the limits, or ranks deadlock.

    Args:
        problem: The problem to solve.
        warm_ups: For each rank, the stages of its first forwards.
    """
    greedy = _Greedy(problem)
    if not greedy.warm_up(warm_ups):
        return None
    # F and I only: the filler places W between them.
    left = 2 * problem.num_stages * problem.num_microbatches - sum(map(len, warm_ups))
    while left:
        done = greedy.backwards() + greedy.forwards()
        if not done:
            return None
        left -= done
    return greedy.filler.finish()


class _Greedy:
    def __init__(self, problem: Problem) -> None:
        self.filler = Filler(problem)
        self._problem = problem
        self._num_ranks = problem.num_ranks
        self._num_microbatches = problem.num_microbatches
        self._stages = [problem.stages_of(rank) for rank in range(problem.num_ranks)]
        self._next: dict[Kind, list[int]] = {kind: [0] * problem.num_stages for kind in ("F", "I")}

    def warm_up(self, warm_ups: Sequence[Sequence[int]]) -> bool:
        """Places the warm-up forwards. False if they do not fit or wait for ever."""
        position, left = [0] * self._num_ranks, sum(map(len, warm_ups))
        while left:
            before = left
            for rank, stages in enumerate(warm_ups):
                while position[rank] < len(stages) and self._on_its_way("F", stages[position[rank]]):
                    if not self._put("F", stages[position[rank]]):
                        return False
                    position[rank] += 1
                    left -= 1
            if left == before:
                return False
        return True

    def forwards(self) -> int:
        """Places one forward on each rank that has one, from the first rank on. Returns their number."""
        return sum(self._put_first("F", reversed(stages)) for stages in self._stages)

    def backwards(self) -> int:
        """Places one backward on each rank that has one, and returns their number.

        Ranks whose gradient was known when the turn began come first. The other ranks may use gradients of this turn.
        They do so only in their last unfinished stage of the model, which keeps the order of their stages.
        """
        put, rest = 0, []
        picks = [next((stage for stage in own if self._on_its_way("I", stage)), None) for own in self._stages]
        for rank, stage in enumerate(picks):
            if stage is None:
                rest.append(rank)
            else:
                put += self._put("I", stage)
        # Gradients travel both ways over the ranks of a V, so both directions are tried.
        for again in (rest, rest[::-1]):
            for rank in again:
                unfinished = [s for s in self._stages[rank] if self._next["I"][s] < self._num_microbatches]
                if picks[rank] is None and unfinished and self._on_its_way("I", unfinished[-1]):
                    picks[rank] = unfinished[-1]
                    put += self._put("I", unfinished[-1])
        return put

    def _put_first(self, kind: Kind, stages: Iterable[int]) -> bool:
        stage = next((stage for stage in stages if self._on_its_way(kind, stage)), None)
        return stage is not None and self._put(kind, stage)

    def _on_its_way(self, kind: Kind, stage: int) -> bool:
        microbatch = self._next[kind][stage]
        return microbatch < self._num_microbatches and self.filler.arrival(kind, stage, microbatch) is not None

    def _put(self, kind: Kind, stage: int) -> bool:
        microbatch = self._next[kind][stage]
        arrival = self.filler.arrival(kind, stage, microbatch)
        assert arrival is not None
        if not self.filler.put(kind, stage, microbatch, arrival):
            return False
        self._next[kind][stage] = microbatch + 1
        return True


Shape: TypeAlias = tuple[tuple[int, ...], ...]
"""Rows of numbers, one column per rank."""

# Forwards per later rank: 1 is the warm-up of 1F1B and ZB-H1, 2 that of ZB-H2.
_SLOPES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
_DROPS = (0, 1, 2, 3)


class WarmUps(ABC):
    """Warm-ups of one kind of placement."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._most = [_capacity(problem, rank) for rank in range(problem.num_ranks)]

    @abstractmethod
    def starts(self) -> list[Shape]:
        """Returns the shapes to begin with."""

    @abstractmethod
    def repaired(self, shape: Shape) -> Shape:
        """Returns the nearest shape that can run."""

    @abstractmethod
    def forwards(self, shape: Shape) -> list[list[int]]:
        """Returns for each rank the stages of its first forwards, in order."""


def warm_ups_of(problem: Problem) -> WarmUps | None:
    """Returns the warm-ups for the problem's placement. None if it is neither one stage per rank nor a V."""
    if problem.placement == loop(problem.num_ranks):
        return _Line(problem)
    if problem.placement == vee(problem.num_ranks):
        return _Vee(problem)
    return None


class _Line(WarmUps):
    """Warm-ups for one stage per rank."""

    def starts(self) -> list[Shape]:
        """Returns shapes that fill the time until the first gradient, constant slopes, and as many forwards as fit.

        Each shape also comes in variants whose numbers drop from rank to rank by at least 0, 1, 2 or 3.
        """
        # If two neighbours hold equally many forwards, each microbatch pays for the way to and fro. So drops are tried.
        ranks = self._problem.num_ranks
        bases = [self._until_gradient(early=False), self._until_gradient(early=True), list(self._most)]
        bases += [[int(slope * (ranks - 1 - rank)) + 1 for rank in range(ranks)] for slope in _SLOPES]
        shapes = [self._dropping(base, drop) for base in bases for drop in _DROPS]
        return list(dict.fromkeys(shapes))

    def repaired(self, shape: Shape) -> Shape:
        """Clamps to at least 1 forward, the memory limit, and the number of the rank before."""
        return self._dropping(list(shape[0]), 0)

    def forwards(self, shape: Shape) -> list[list[int]]:
        """Returns forwards of the rank's one stage."""
        return [[rank] * count for rank, count in enumerate(shape[0])]

    def _dropping(self, counts: list[int], drop: int) -> Shape:
        dropped: list[int] = []
        for rank, count in enumerate(counts):
            above = dropped[-1] - drop if rank else count
            dropped.append(max(1, min(count, above, self._most[rank])))
        return (tuple(dropped),)

    def _until_gradient(self, early: bool) -> list[int]:
        """Returns the number of forwards until the first gradient arrives, rounded up, or down if `early`."""
        problem = self._problem
        forward, transfer, last = problem.forward, problem.transfer, problem.num_ranks - 1
        starts = [0]
        for rank in range(last):
            starts.append(starts[-1] + forward[rank] + transfer[rank])
        counts = [1] * problem.num_ranks
        gradient = starts[last] + forward[last] + problem.backward_input[last]
        # Back from the last rank, whose gradient leaves after one F and one I.
        for rank in reversed(range(last)):
            gradient += transfer[rank]
            time = gradient - starts[rank]
            fit = time // forward[rank] if forward[rank] else self._most[rank]
            if not early and forward[rank] and time % forward[rank]:
                fit += 1
            counts[rank] = max(1, min(fit, self._most[rank]))
            gradient = max(gradient, starts[rank] + counts[rank] * forward[rank]) + problem.backward_input[rank]
        return counts


class _Vee(WarmUps):
    """Warm-ups for two stages per rank, down the ranks and back up."""

    def starts(self) -> list[Shape]:
        """Returns the warm-up of ZB-V, scaled by factors from 1.0 to 0.3 for smaller memory limits."""
        ranks = self._problem.num_ranks
        shapes = []
        for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
            first = tuple(max(1, int(share * (2 * (ranks - rank) - 1))) for rank in range(ranks))
            pairs = tuple(int(share * rank) for rank in range(ranks))
            shapes.append(self.repaired((first, pairs)))
        return list(dict.fromkeys(shapes))

    def repaired(self, shape: Shape) -> Shape:
        """Clamps to at least one forward of the first stage, the existing microbatches, and the memory limit."""
        count = self._problem.num_microbatches
        first, pairs = [], []
        for rank, (one, two) in enumerate(zip(*shape, strict=True)):
            one = max(1, min(one, count, 2 * self._most[rank] - 1))
            two = max(0, min(two, count - one, (2 * self._most[rank] - 1 - one) // 2))
            first.append(one)
            pairs.append(two)
        return tuple(first), tuple(pairs)

    def forwards(self, shape: Shape) -> list[list[int]]:
        """Returns forwards of the first stage, then pairs, then one of the second stage."""
        last = self._problem.num_stages - 1
        return [
            [rank] * one + [last - rank, rank] * two + [last - rank]
            for rank, (one, two) in enumerate(zip(*shape, strict=True))
        ]


def _capacity(problem: Problem, rank: int) -> int:
    """Returns the number of microbatches that a rank has room for, at least 1."""
    each = sum(problem.activation[stage] for stage in problem.stages_of(rank))
    return max(1, min(problem.num_microbatches, problem.limits[rank] // each if each else problem.num_microbatches))
