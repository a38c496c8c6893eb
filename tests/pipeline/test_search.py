"""The search: valid, within its limit, never worse than what has a name, and as good as what is published."""

from __future__ import annotations

import csv
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import ScheduleError
from echelon.pipeline.plan.action import loop, vee
from echelon.pipeline.plan.cost import Costs
from echelon.pipeline.schedules import build, names, search
from echelon.pipeline.search.list_scheduler import pull_forward
from echelon.pipeline.search.local_search import replay, swap
from echelon.pipeline.search.problem import Problem, lower_bound, problem, rank_limits
from echelon.pipeline.search.weight_placement import fill, skeleton_of, to_actions

EQUAL = Costs(1, 1, 1, transfer=0)

with (Path(__file__).parent / "published.csv").open(newline="") as file:
    ROWS = list(csv.DictReader(file))

# What W keeps of an activation in the authors' model of memory: 32 of the 34 + 5 a s / h parts that a transformer layer
# with hidden size h, a heads and sequences of s = 1024 holds (Zero Bubble Pipeline Parallelism, table 1).
HEADS_AND_HIDDEN = {"1.5B": (24, 2304), "6.2B": (32, 4096), "14.6B": (40, 5120), "28.3B": (48, 6144)}


def weight_share(model: str) -> float:
    heads, hidden = HEADS_AND_HIDDEN[model]
    return 32 / (34 + 5 * heads * 1024 / hidden)


def stage_costs(row: dict[str, str], weight_activation: float | None) -> Costs:
    # Table 8 gives times of half a stage.
    scale = 2 if row["table"] == "8" else 1
    times = (scale * float(row[name]) for name in ("forward", "backward_input", "backward_weight"))
    return Costs(*times, transfer=float(row["transfer"]), weight_activation=weight_activation)


def small_problem(costs: Costs, ranks: int, microbatches: int, limit: float | None = None) -> Problem:
    placement = loop(ranks)
    return problem(costs, placement, microbatches, rank_limits(costs, placement, microbatches, limit))


def each(rows: list[dict[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows, ids=[f"{row['model']}-{row['microbatches']}" for row in rows])


@each([row for row in ROWS if int(row["ranks"]) == 8])
def test_published_rates_at_twice_the_memory(row):
    _reaches(row)


@pytest.mark.slow
@pytest.mark.timeout(300)
@each([row for row in ROWS if int(row["ranks"]) > 8])
def test_published_rates_at_twice_the_memory_of_more_ranks(row):
    _reaches(row)


def _reaches(row: dict[str, str]) -> None:
    ranks, microbatches = int(row["ranks"]), int(row["microbatches"])
    costs = stage_costs(row, weight_share(row["model"]))
    schedule = search(costs, num_ranks=ranks, num_microbatches=microbatches, memory_limit=2 * ranks)
    schedule.check(memory_limit=2 * ranks, costs=costs)
    # Table 8 has no such column; ZB-H2 fits the same limit.
    best = min(float(row["bubble_zb_2p"] or 1), float(row["bubble_zb_h2"]))
    assert schedule.simulate(costs).bubble_rate <= best + 0.0001


@each(ROWS)
def test_with_all_of_an_activation_kept_until_w_the_search_reaches_the_bound(row):
    ranks, microbatches = int(row["ranks"]), int(row["microbatches"])
    costs = stage_costs(row, None)
    schedule = search(costs, ranks, microbatches, 2 * ranks)
    exact = small_problem(costs, ranks, microbatches, 2 * ranks)
    timeline = schedule.simulate(costs)
    assert timeline.span / max(timeline.busy) == pytest.approx(lower_bound(exact) / max(exact.work), rel=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(300)
@each([row for row in ROWS if row["bubble_zb_v"]])
def test_on_a_v_it_is_at_least_as_good_as_zb_v(row):
    ranks, microbatches = int(row["ranks"]), int(row["microbatches"])
    times = (float(row[name]) for name in ("forward", "backward_input", "backward_weight", "transfer"))
    costs = Costs(*times)
    schedule = search(costs, ranks, microbatches, memory_limit=ranks, num_chunks=2)
    schedule.check(memory_limit=2 * ranks, costs=costs)
    assert schedule.simulate(costs).bubble_rate <= float(row["bubble_zb_v"]) + 0.0001


@pytest.mark.parametrize(("ranks", "microbatches", "spans"), [(4, 8, (27, 25, 24, 24)), (8, 16, (55, 51, 48, 48))])
def test_small_cases_at_every_limit(ranks, microbatches, spans):
    for times, span in zip((1, 1.5, 2, 3), spans, strict=True):
        schedule = search(EQUAL, ranks, microbatches, memory_limit=times * ranks)
        schedule.check(memory_limit=times * ranks)
        assert schedule.simulate(EQUAL).span <= span


@pytest.mark.parametrize(
    ("ranks", "microbatches", "costs", "limit"),
    [
        (4, 11, Costs(14.764, 13.095, 13.923, 1.476, weight_activation=0.3), 6),
        (6, 13, Costs(11.785, 16.97, 10.296, 0.236, weight_activation=0.7), 9),
        (8, 33, Costs(14.134, 12.549, 12.923, 0.283, weight_activation=0.7), 12),
    ],
)
def test_where_forwards_would_have_to_give_way_the_bound_is_half_a_percent_away(ranks, microbatches, costs, limit):
    exact = small_problem(costs, ranks, microbatches, limit)
    timeline = search(costs, ranks, microbatches, limit).simulate(costs)
    assert timeline.span / max(timeline.busy) <= 1.005 * lower_bound(exact) / max(exact.work)


amounts = st.integers(1, 9)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Costs, int, int, float]:
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    per_stage = st.lists(amounts, min_size=ranks, max_size=ranks)
    transfer = st.lists(st.integers(0, 3), min_size=ranks - 1, max_size=ranks - 1)
    costs = Costs(draw(per_stage), draw(per_stage), draw(per_stage), draw(transfer), draw(per_stage))
    return costs, ranks, microbatches, draw(st.sampled_from([1, 1.5, 2, 3, 100])) * draw(st.sampled_from([1, ranks]))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases())
def test_unequal_stages_are_never_worse_than_the_best_name_that_fits(case):
    costs, ranks, microbatches, limit = case
    limits = rank_limits(costs, loop(ranks), microbatches, limit)

    schedule = search(costs, ranks, microbatches, limit)

    schedule.check(memory_limit=limits, costs=costs)
    span = schedule.simulate(costs).span
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        named = build(name, ranks, microbatches)
        if all(peak <= most for peak, most in zip(named.simulate(costs).peak_activations, limits, strict=True)):
            assert span <= named.simulate(costs).span
    assert search(costs, ranks, microbatches, limit) == schedule


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_no_named_schedule_beats_the_bound(case):
    costs, ranks, microbatches, _ = case
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        timeline = build(name, ranks, microbatches).simulate(costs)
        held = max(peak / unit for peak, unit in zip(timeline.peak_activations, costs.activation, strict=True))
        exact = small_problem(costs, ranks, microbatches, Fraction(held).limit_denominator(1000))
        assert timeline.span >= lower_bound(exact)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_every_step_of_the_search_keeps_orders_valid(case):
    costs, ranks, microbatches, limit = case
    exact = small_problem(costs, ranks, microbatches, limit)
    placement = loop(ranks)
    limits = rank_limits(costs, placement, microbatches, limit)
    for name in ("gpipe", "1f1b"):
        named = build(name, ranks, microbatches)
        pulled = pull_forward(exact, skeleton_of(named.orders), 4)
        filled = pulled and fill(exact, pulled)
        if not filled:
            continue
        swapped = swap(exact, filled.orders, tries=20)
        played = replay(exact, swapped)
        assert played is not None
        assert max(played.spans) <= filled.span
        for orders in (filled.orders, swapped):
            schedule = type(named)("step", microbatches, placement, to_actions(orders))
            schedule.check(memory_limit=limits, costs=costs)
        assert (
            type(named)("step", microbatches, placement, to_actions(filled.orders)).simulate(costs).span == filled.span
        )


def test_costs_per_chunk_ask_for_two_chunks():
    costs = Costs(forward=[1] * 8, transfer=0)
    schedule = search(costs, num_ranks=4, num_microbatches=8, memory_limit=4)
    assert schedule.num_stages == 8
    assert schedule.placement == vee(4)
    assert schedule.simulate(costs).bubble_rate == 0


def test_pairs_that_overlap_compete_too():
    costs = Costs(1, 1, 1, transfer=0, overlapped=2)
    schedule = search(costs, 2, 4, num_chunks=2)
    assert schedule.name == "dualpipe-v"


def test_recomputation_is_room_that_a_backward_needs():
    costs = Costs(1, 1, 1, transfer=0, activation=1, recompute=1, recomputed_activation=3)
    schedule = search(costs, 2, 4, memory_limit=6)
    schedule.check(memory_limit=6, costs=costs)
    with pytest.raises(ScheduleError, match="leaves no room for a backward: raise it by recomputed"):
        search(costs, 2, 4, memory_limit=1)


def test_a_stage_that_holds_more_until_its_weight_gradient_keeps_the_limit():
    """Between I and W a stage holds the gradient of its output as well, so I needs room."""
    costs = Costs(1, 1, 1, transfer=0, activation=1, weight_activation=2)
    search(costs, 2, 4, memory_limit=3).check(memory_limit=3, costs=costs)
    with pytest.raises(ScheduleError, match="leaves no room for a backward"):
        search(costs, 2, 4, memory_limit=1)


def test_amounts_of_very_different_size_keep_the_limit():
    """They are rounded to a unit of a millionth here, and upwards."""
    costs = Costs(1, 1, 1, transfer=0, activation=(1e6, 1e-9))
    search(costs, 2, 4, memory_limit=2).check(rank_limits(costs, loop(2), 4, 2), costs)


def test_thirds_fit_exactly():
    """Three W of 2/3 fill a gap of 2; with float sums one would not fit, and the span would grow."""
    exact = Costs(2, 2, Fraction(2, 3), transfer=0)
    rounded = Costs(2.0, 2.0, 2 / 3, transfer=0)
    spans = [search(costs, 4, 8, 8).simulate(costs).span for costs in (exact, rounded)]
    assert float(spans[0]) == pytest.approx(float(spans[1]), rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ranks": 0}, "num_ranks=0: give a whole number of at least 1"),
        ({"num_microbatches": 1.5}, "num_microbatches=1.5: give a whole number"),
        ({"memory_limit": 0.5}, "memory_limit=0.5: a rank must hold at least 1 microbatch; .* here 2"),
        ({"memory_limit": "2"}, "memory_limit='2': a rank must hold"),
        ({"num_chunks": 0}, "num_chunks=0: give a whole number"),
        ({"num_microbatches": 10**7}, "are 20000000 forwards, too many for one schedule"),
        ({"costs": Costs(forward=[1, 2, 3])}, "forward has 3 values for 2 stages"),
    ],
)
def test_bad_input_is_told_with_what_works(arguments, message):
    good = {"costs": EQUAL, "num_ranks": 2, "num_microbatches": 2, "memory_limit": 2}
    with pytest.raises(ScheduleError, match=message):
        search(**(good | arguments))


def test_every_name_competes():
    assert {"gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v"} <= set(names())


def test_an_infinite_limit_is_no_limit():
    assert search(Costs(), 2, 4, float("inf")) == search(Costs(), 2, 4)


def test_costs_are_those_by_default_and_a_limit_may_be_a_number_of_numpy():
    assert str(search(None, 2, 2, numpy.float32(2))) == str(search(Costs(), 2, 2, 2))
