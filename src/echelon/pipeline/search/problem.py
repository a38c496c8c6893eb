"""What is to be scheduled, in whole numbers.

The search compares sums of costs millions of times, and whether a W fits a gap exactly must not hang on the rounding of
floats. So all times become multiples of one small unit, and all amounts of memory of another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from echelon.pipeline.plan.cost import Costs
from echelon.timeline.timeline import Time

# The span that no schedule of a problem can beat.


def lower_bound(problem: Problem) -> int:
    """Returns a time that the longest span of any rank cannot be below.

    Three reasons, the first for any placement, the others for one stage per rank:

    1. A rank needs the time of its own work.
    2. Between the first F and the last W of a rank lie the way down to a later rank, that one's F and I of every
       microbatch and the W that its memory asks for before its last F, and the way back.
    3. Before its first I a rank waits for the way down and back, and all it can do meanwhile is as many F as it may
       hold.
    """
    best = max(problem.work)
    if problem.num_stages > problem.num_ranks:
        return best
    for stage in range(problem.num_stages):
        best = max(best, _warm_up(problem, stage), *(_through(problem, stage, to) for to in _from(problem, stage)))
    return best


def _from(problem: Problem, stage: int) -> range:
    return range(stage, problem.num_stages)


def _through(problem: Problem, stage: int, to: int) -> int:
    there = sum(problem.forward[stage:to]) + sum(problem.transfer[stage:to])
    back = sum(problem.backward_input[stage:to]) + sum(problem.transfer[stage:to])
    both = problem.num_microbatches * (problem.forward[to] + problem.backward_input[to])
    early = _early_weights(problem, to) * problem.backward_weight[to]
    return there + both + early + back + problem.backward_weight[stage]


def _early_weights(problem: Problem, stage: int) -> int:
    """How many W must come before the last F: all I but one may have been done, and the last F must find room."""
    activation, kept = problem.activation[stage], problem.kept[stage]
    limit = problem.limits[problem.placement[stage]]
    if not 0 < kept <= activation:
        return 0
    over = activation + kept * (problem.num_microbatches - 1) - limit
    return max(0, -(-over // kept))


def _warm_up(problem: Problem, stage: int) -> int:
    round_trip = sum(problem.forward[stage:]) + sum(problem.backward_input[stage + 1 :])
    round_trip += 2 * sum(problem.transfer[stage:])
    activation, limit = problem.activation[stage], problem.limits[problem.placement[stage]]
    most = min(problem.num_microbatches, limit // activation) if activation else problem.num_microbatches
    rest = problem.backward_input[stage] + problem.backward_weight[stage]
    return round_trip + problem.num_microbatches * rest + (problem.num_microbatches - most) * problem.forward[stage]


# Numbers that are whole multiples of a unit this fine stay exact (18.522 is 18522 thousandths); others are rounded.
_FINEST = 10**12
# Sums of floats may be a hair above what they should be. `Schedule.check` grants twice as much.
_TOLERANCE = Fraction(1, 2 * 10**9)


@dataclass(frozen=True)
class Problem:
    """Costs per stage (transfer: per boundary), and what each rank may hold, in whole numbers.

    Args:
        num_microbatches: How many each stage runs.
        placement: The rank of each stage.
        forward: Time of F.
        backward_input: Time of I.
        backward_weight: Time of W.
        transfer: Time between stages s and s + 1; 0 on one rank.
        activation: Memory held from F on.
        kept: What of it is held after I, until W.
        recomputed: Memory that I needs on top while it runs.
        limits: The most that each rank may hold.
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
        """How many ranks take part."""
        return len(self.limits)

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.placement)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in the model's order."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]

    @property
    def work(self) -> tuple[int, ...]:
        """For each rank, the time of all it has to do."""
        work = [0] * self.num_ranks
        for stage, rank in enumerate(self.placement):
            each = self.forward[stage] + self.backward_input[stage] + self.backward_weight[stage]
            work[rank] += each * self.num_microbatches
        return tuple(work)


def rank_limits(
    costs: Costs, placement: Sequence[int], num_microbatches: int, memory_limit: Time | None
) -> tuple[Time, ...]:
    """What each rank may hold, in units of `Costs.activation`.

    Args:
        costs: Of the stages.
        placement: The rank of each stage.
        num_microbatches: How many there are.
        memory_limit: In microbatches: one counts the activations of all the stages that the rank holds. None: all of
            the microbatches at once.
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
    """Makes the problem of costs and limits.

    Raises:
        ScheduleError: costs that are not for so many stages.
    """
    per_stage = costs.per_stage(placement)
    forward, backward_input, backward_weight, transfer = _whole(
        per_stage.forward, per_stage.backward_input, per_stage.backward_weight, per_stage.transfer
    )
    activation, kept, recomputed, most = _whole(
        per_stage.activation,
        per_stage.weight_activation,
        per_stage.recomputed_activation,
        [_exact(limit) * (1 + _TOLERANCE) for limit in limits],
        unit=_unit(per_stage.activation, per_stage.weight_activation, per_stage.recomputed_activation, limits),
    )
    return Problem(
        num_microbatches=num_microbatches,
        placement=tuple(placement),
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        transfer=transfer,
        activation=activation,
        kept=kept,
        recomputed=recomputed,
        limits=most,
    )


def _exact(number: Time) -> Fraction:
    # Of floats, what they print: 0.1 is a tenth, as whoever wrote it meant.
    return Fraction(repr(float(number))) if isinstance(number, float) else Fraction(number)


def _unit(*groups: Iterable[Time]) -> Fraction:
    numbers = [_exact(number) for group in groups for number in group]
    parts = math.lcm(*(number.denominator for number in numbers))
    largest = max(numbers, default=Fraction(0)) or Fraction(1)
    return max(Fraction(1, parts), largest / _FINEST)


def _whole(*groups: Iterable[Time], unit: Fraction | None = None) -> list[tuple[int, ...]]:
    groups = tuple(map(tuple, groups))
    unit = unit or _unit(*groups)
    return [tuple(math.floor(_exact(number) / unit) for number in group) for group in groups]
