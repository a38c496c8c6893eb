"""Problem of the search: costs and limits as whole numbers, and a lower bound of the span.

The search compares sums of costs millions of times, and whether a W exactly fits a gap must not depend on the rounding
of floats. So all times become multiples of one small unit, and all amounts of memory multiples of another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import sub

from echelon.pipeline.plan.cost import Costs
from echelon.timeline.timeline import Time


def lower_bound(problem: Problem) -> int:
    """Returns a lower bound of the longest span of any rank.

    It is the largest of three bounds. The first holds for any placement, the others for one stage per rank:

    1. A rank needs the time of its own work.
    2. Between the first F and the last W of a rank lie the way down to a later rank and the way back. In between are
       the later rank's F and I of every microbatch, and the W that its memory requires before its last F.
    3. Before its first I a rank waits for the way down and back. Meanwhile it can only run as many F as it may hold.
    """
    best = max(problem.work)
    # With several stages per rank, a rank can do other work on the way, and the other two bounds do not hold.
    if problem.num_stages > problem.num_ranks:
        return best
    for stage in range(problem.num_stages):
        bounds = [_through(problem, stage, to) for to in range(stage, problem.num_stages)]
        best = max(best, _warm_up(problem, stage), *bounds)
    return best


def _through(problem: Problem, stage: int, to: int) -> int:
    there = sum(problem.forward[stage:to]) + sum(problem.transfer[stage:to])
    back = sum(problem.backward_input[stage:to]) + sum(problem.transfer[stage:to])
    both = problem.num_microbatches * (problem.forward[to] + problem.backward_input[to])
    early = _early_weights(problem, to) * problem.backward_weight[to]
    return there + both + early + back + problem.backward_weight[stage]


def _early_weights(problem: Problem, stage: int) -> int:
    """Returns the number of W that must precede the last F so that it has room, even after all other I."""
    activation, kept = problem.activation[stage], problem.kept[stage]
    limit = problem.limits[problem.placement[stage]]
    if not 0 < kept <= activation:
        return 0  # a W frees no memory then
    over = activation + kept * (problem.num_microbatches - 1) - limit
    return max(0, -(-over // kept))  # rounded up


def _warm_up(problem: Problem, stage: int) -> int:
    round_trip = sum(problem.forward[stage:]) + sum(problem.backward_input[stage + 1 :])
    round_trip += 2 * sum(problem.transfer[stage:])
    activation, limit = problem.activation[stage], problem.limits[problem.placement[stage]]
    most = min(problem.num_microbatches, limit // activation) if activation else problem.num_microbatches
    rest = problem.backward_input[stage] + problem.backward_weight[stage]
    return round_trip + problem.num_microbatches * rest + (problem.num_microbatches - most) * problem.forward[stage]


# The unit is at least 1e-12 of the largest number. Multiples of it stay exact (18.522 is 18522 thousandths), and other
# numbers are rounded.
_FINEST = 10**12
# Sums of floats may be a hair above the exact sum. `Schedule.check` grants twice as much.
_TOLERANCE = Fraction(1, 2 * 10**9)


@dataclass(frozen=True)
class Problem:
    """Costs per stage (transfer: per boundary) and memory limits per rank, in whole numbers.

    Args:
        num_microbatches: Number of microbatches that each stage runs.
        placement: The rank of each stage.
        forward: Time of F.
        backward_input: Time of I.
        backward_weight: Time of W.
        transfer: Time between stages s and s + 1; 0 on one rank.
        activation: Memory held from F on.
        kept: Part of `activation` held after I, until W.
        recomputed: Memory that I needs in addition, while it runs or after it.
        limits: Most memory that each rank may hold.
    """

    num_microbatches: int
    placement: tuple[int, ...]
    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    transfer: tuple[int, ...]
    activation: tuple[int, ...]
    kept: tuple[int, ...]
    recomputed: tuple[int, ...]
    limits: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.limits)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    def stages_of(self, rank: int) -> list[int]:
        """Returns the stages of a rank, in the model's order."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]

    @property
    def work(self) -> tuple[int, ...]:
        """For each rank, the time of all of its actions."""
        work = [0] * self.num_ranks
        for stage, rank in enumerate(self.placement):
            each = self.forward[stage] + self.backward_input[stage] + self.backward_weight[stage]
            work[rank] += each * self.num_microbatches
        return tuple(work)


def rank_limits(
    costs: Costs, placement: Sequence[int], num_microbatches: int, memory_limit: Time | None
) -> tuple[Time, ...]:
    """Returns the memory limit of each rank, in units of `Costs.activation`.

    Args:
        costs: Costs of the stages.
        placement: The rank of each stage.
        num_microbatches: Number of microbatches.
        memory_limit: Limit in microbatches. One microbatch counts its activations on all stages of the rank. None: all
            microbatches at once.
    """
    per_stage = costs.per_stage(placement)
    limits: list[Time] = []
    for rank in range(max(placement) + 1):
        held = [stage for stage, holder in enumerate(placement) if holder == rank]
        unit = sum((per_stage.activation[stage] for stage in held), start=Fraction(0))
        if memory_limit is not None:
            limits.append(unit * memory_limit)
        else:
            extra = max(per_stage.recomputed_activation[stage] for stage in held)
            kept = max(per_stage.weight_activation[stage] for stage in held)
            limits.append((unit + kept * len(held)) * num_microbatches + extra)
    return tuple(limits)


def problem(costs: Costs, placement: Sequence[int], num_microbatches: int, limits: Sequence[Time]) -> Problem:
    """Returns the problem for costs and limits.

    Raises:
        ScheduleError: costs for another number of stages.
    """
    per_stage = costs.per_stage(placement)
    forward, backward_input, backward_weight, transfer = _whole(
        per_stage.forward, per_stage.backward_input, per_stage.backward_weight, per_stage.transfer
    )
    memory = per_stage.activation, per_stage.weight_activation, per_stage.recomputed_activation
    unit = _unit(*memory, limits)
    activation, kept, recomputed = _whole(*memory, unit=unit)
    return Problem(
        num_microbatches=num_microbatches,
        placement=tuple(placement),
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        transfer=transfer,
        activation=activation,
        kept=kept,
        # A stage may hold more from I to W than before, as the gradient of its output.
        recomputed=tuple(map(max, recomputed, map(sub, kept, activation))),
        limits=tuple(math.floor(_exact(limit) * (1 + _TOLERANCE) / unit) for limit in limits),
    )


def _exact(number: Time) -> Fraction:
    # A float is taken as it prints: 0.1 is a tenth, as its author meant, not the nearest binary fraction.
    return Fraction(repr(float(number))) if isinstance(number, float) else Fraction(number)


def _unit(*groups: Iterable[Time]) -> Fraction:
    numbers = [_exact(number) for group in groups for number in group]
    parts = math.lcm(*(number.denominator for number in numbers))
    largest = max(numbers, default=Fraction(0)) or Fraction(1)
    return max(Fraction(1, parts), largest / _FINEST)


def _whole(*groups: Iterable[Time], unit: Fraction | None = None) -> list[tuple[int, ...]]:
    groups = tuple(map(tuple, groups))
    unit = unit or _unit(*groups)
    # Rounded up: a rank must not hold more than its limit.
    return [tuple(math.ceil(_exact(number) / unit) for number in group) for group in groups]
