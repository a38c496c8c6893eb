"""Layers cut into stages: the slowest stage is the optimum, whatever the layers."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import PartitionError
from echelon.pipeline.plan.partition import partition


def all_cuts(num_layers: int, num_stages: int) -> Iterator[tuple[range, ...]]:
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(range(first, last) for first, last in pairwise((0, *inner, num_layers)))


def sums(numbers: Sequence[int], stages: tuple[range, ...]) -> list[int]:
    return [sum(numbers[layer] for layer in stage) for stage in stages]


LAYERS = st.lists(st.integers(0, 12), min_size=1, max_size=9)


@settings(deadline=None)
@given(LAYERS, st.data())
def test_the_slowest_stage_is_the_optimum_of_all_cuts(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))

    result = partition(costs, num_stages)

    assert result.slowest == min(max(sums(costs, stages)) for stages in all_cuts(len(costs), num_stages))
    assert result.stages in set(all_cuts(len(costs), num_stages))
    assert list(result.costs) == sums(costs, result.stages)


@pytest.mark.parametrize(
    ("costs", "num_stages", "slowest"),
    [
        ([8, 9, 3, 0, 5, 11, 11, 5], 4, 16),
        ([2, 3, 7, 5, 8, 2, 5], 4, 12),
        ([11, 1, 6, 9, 1, 9, 10, 7, 11], 3, 27),
        ([6, 11, 11, 8, 4, 3, 6, 5, 6], 3, 23),
    ],
)
def test_where_one_more_would_be_easier(costs: list[int], num_stages: int, slowest: int) -> None:
    """A cap that is 1 too high leads to a slower cut here; among random layers that is rare."""
    assert partition(costs, num_stages).slowest == slowest


@settings(deadline=None)
@given(LAYERS, st.data())
def test_a_memory_limit_is_kept_and_costs_no_more_than_it_must(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    memory = data.draw(st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs)))
    limit = data.draw(st.integers(0, 30))
    fitting = [cuts for cuts in all_cuts(len(costs), num_stages) if max(sums(memory, cuts)) <= limit]

    if not fitting:
        with pytest.raises(PartitionError):
            partition(costs, num_stages, memory=memory, memory_limit=limit)
        return
    result = partition(costs, num_stages, memory=memory, memory_limit=limit)

    assert result.slowest == min(max(sums(costs, stages)) for stages in fitting)
    assert result.memory is not None
    assert list(result.memory) == sums(memory, result.stages)
    assert max(result.memory) <= limit


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), st.data())
def test_floats_are_as_exact_as_whole_numbers(costs: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    exact = [Fraction(cost) for cost in costs]

    result = partition(costs, num_stages)

    best = min(max(sum(exact[i] for i in stage) for stage in cuts) for cuts in all_cuts(len(costs), num_stages))
    assert result.slowest == float(best)


def test_equal_layers_are_spread_evenly_within_the_optimum() -> None:
    assert sorted(len(stage) for stage in partition([1] * 10, 4).stages) == [2, 2, 3, 3]


def test_what_it_prints() -> None:
    assert str(partition([1, 2, 3], 2)) == "stage 0: layers 0 to 1, cost 3\nstage 1: layers 2 to 2, cost 3"


def test_ten_thousand_layers_into_64_stages_take_less_than_a_second() -> None:
    rng = random.Random(0)
    costs = [rng.random() for _ in range(10_000)]

    began = time.process_time()
    result = partition(costs, 64)

    assert time.process_time() - began < 1.0
    assert sum(map(len, result.stages)) == 10_000
    assert result.slowest <= math.fsum(costs) / 64 + max(costs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], 3), "2 layers cannot fill 3 stages: use at most 2 stages"),
        (([1, 2], 0), "num_stages=0: give a whole number of at least 1"),
        (([1, 2], True), "num_stages=True: give a whole number"),
        (([1, -2], 1), r"costs\[1\]=-2 cannot be a cost: give a finite number"),
        (([1, math.nan], 1), r"costs\[1\]=nan cannot be a cost"),
        (([1, "2"], 1), r"costs\[1\]='2' is not a number"),
        (([1, 2], 1, [1, 1]), "memory was given without memory_limit: give both"),
        (([1, 2], 1, None, 3), "memory_limit was given without memory"),
        (([1, 2], 1, [1], 3), "memory has 1 values for 2 layers"),
        (([1, 2], 1, [1, 1], -1), "memory_limit=-1 cannot be a cost"),
        (([1, 2], 2, [5, 1], 3), "layer 0 alone needs 5 of memory, over the limit of 3: raise the limit to at least 5"),
        (([1] * 6, 2, [1] * 6, 2), "do not fit 2 stages with a memory limit of 2 each: use at least 3 stages"),
    ],
)
def test_bad_input_is_told_with_what_works(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        partition(*arguments)  # type: ignore[arg-type]
