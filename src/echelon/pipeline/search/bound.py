"""The span that no schedule of a problem can beat."""

from __future__ import annotations

from echelon.pipeline.search.problem import Problem


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
