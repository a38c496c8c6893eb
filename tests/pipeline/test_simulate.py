"""The simulation: by hand, against brute force, and against its own explanation."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import ScheduleError
from echelon.pipeline.plan.action import Action, Overlapped, actions_of
from echelon.pipeline.plan.cost import Costs
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.schedules import build
from tests.helpers.named_schedules import schedules

amounts = st.integers(0, 12).map(lambda quarters: Fraction(quarters, 4))


@st.composite
def schedules_with_costs(draw):
    """A schedule and costs that differ from stage to stage and from boundary to boundary."""
    schedule = draw(schedules(max_ranks=5, max_microbatches=12))
    stages = schedule.num_stages

    def per_stage(count=stages):
        return draw(st.lists(amounts, min_size=count, max_size=count))

    overlapped = draw(st.none() | st.just(per_stage()))
    return schedule, Costs(
        per_stage(), per_stage(), per_stage(), per_stage(stages - 1), recompute=per_stage(), overlapped=overlapped
    )


def starts_by_brute_force(schedule, costs):
    """Lets every step start as late as what it needs ends, again and again, until nothing moves."""
    per_stage = costs.per_stage(schedule.placement)
    steps = {(rank, i): step for rank, order in enumerate(schedule.orders) for i, step in enumerate(order)}
    where = {
        (kind == "F", stage, microbatch): place
        for place, step in steps.items()
        for stage, kind, microbatch in actions_of(step)
        if kind != "W"
    }

    def duration(step):
        actions = actions_of(step)
        if isinstance(step, Overlapped) and per_stage.overlapped is not None:
            return per_stage.overlapped[step.forward.stage]
        of_kind = dict(zip("FIWB", per_stage[:4], strict=True))
        return sum(of_kind[kind][stage] for stage, kind, _ in actions)

    starts = dict.fromkeys(steps, Fraction(0))
    moved = True
    while moved:
        moved = False
        for (rank, index), step in steps.items():
            earliest = starts[rank, index - 1] + duration(steps[rank, index - 1]) if index else Fraction(0)
            for stage, kind, microbatch in actions_of(step):
                maker = where.get((kind == "F", stage + (-1 if kind == "F" else 1), microbatch))
                if kind != "W" and maker is not None:
                    hop = per_stage.transfer[stage - 1 if kind == "F" else stage]
                    earliest = max(earliest, starts[maker] + duration(steps[maker]) + hop)
            if earliest > starts[rank, index]:
                starts[rank, index] = earliest
                moved = True
    return starts


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schedules_with_costs())
def test_every_step_starts_as_early_as_it_can(case):
    schedule, costs = case
    timeline = schedule.simulate(costs)
    assert {
        (rank, index): start for rank, starts in enumerate(timeline.starts) for index, start in enumerate(starts)
    } == starts_by_brute_force(schedule, costs)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(schedules_with_costs())
def test_work_and_idle_time_add_up(case):
    schedule, costs = case
    timeline = schedule.simulate(costs)
    for busy, idle in zip(timeline.busy, timeline.idle, strict=True):
        assert busy + sum(idle) == timeline.makespan
        assert idle.overhead == 0
        assert min(idle) >= 0


@settings(max_examples=80, deadline=None, derandomize=True)
@given(schedules_with_costs())
def test_the_critical_path_adds_up(case):
    schedule, costs = case
    timeline = schedule.simulate(costs)
    path = timeline.critical_path
    hops = sum((item.transfer.end - item.transfer.start for item in path if item.transfer), start=Fraction(0))
    assert sum(item.span.duration for item in path) + hops == timeline.makespan
    for before, after in pairwise(path):
        arrival = before.span.end if after.transfer is None else after.transfer.end
        assert after.span.start == arrival


def test_unequal_stages_and_boundaries():
    schedule = build("gpipe", 3, 1)
    timeline = schedule.simulate(Costs([1, 2, 3], [4, 5, 6], [7, 8, 9], transfer=[10, 20]))
    assert timeline.starts == ((0, 1 + 10 + 2 + 20 + 3 + 15 + 20 + 13 + 10), (11, 33 + 3 + 15 + 20), (33, 36))


def test_whole_numbers_stay_whole():
    timeline = build("zb-h1", 4, 8).simulate(Costs(2, 3, 1, 1))
    assert {type(time) for starts in timeline.starts for time in starts} == {int}


def test_float_time():
    timeline = build("1f1b", 4, 8).simulate(Costs(0.1, 0.2, 0.3, 0.01))
    exact = build("1f1b", 4, 8).simulate(Costs(Fraction(1, 10), Fraction(1, 5), Fraction(3, 10), Fraction(1, 100)))
    assert timeline.makespan == pytest.approx(float(exact.makespan))


def test_a_split_backward_sends_the_gradient_earlier():
    fused = build("gpipe", 2, 1)
    split = Schedule(
        "split",
        1,
        fused.placement,
        tuple((Action(r, "F", 0), Action(r, "I", 0), Action(r, "W", 0)) for r in range(2)),
    )
    assert fused.simulate(Costs(1, 2, 3)).makespan == 2 * 6
    assert split.simulate(Costs(1, 2, 3)).makespan == 2 * 6 - 3


def test_recomputation_costs_time_and_saves_memory():
    schedule = build("1f1b", 4, 8)
    plain = schedule.simulate(Costs(1, 1, 1, activation=10))
    again = schedule.simulate(Costs(1, 1, 1, activation=1, recompute=1, recomputed_activation=10))
    assert plain.peak_activations == (40, 30, 20, 10)
    assert again.peak_activations == (14, 13, 12, 11), "the inputs, and one stage's activation at a time"
    assert again.span == plain.span * Fraction(4, 3)


def test_activations_until_the_weights_are_done():
    schedule = build("zb-h1", 4, 8)
    assert schedule.simulate(Costs()).peak_activations == (4, 4, 4, 4)
    assert schedule.simulate(Costs(weight_activation=0)).peak_activations == (4, 3, 2, 1)
    assert schedule.simulate(Costs(weight_activation=0.5)).peak_activations == (4, 3.5, 3, 2.5)


def test_a_pair_holds_the_forwards_activation_beside_the_backwards():
    pair = Overlapped(Action(0, "F", 1), Action(0, "B", 0))
    schedule = Schedule("pair", 2, (0,), ((Action(0, "F", 0), pair, Action(0, "B", 1)),))
    timeline = schedule.simulate(Costs(1, 1, 1, overlapped=2))
    assert timeline.makespan == 1 + 2 + 2
    assert timeline.peak_activations == (2,)
    assert schedule.simulate(Costs(1, 1, 1)).makespan == 1 + 3 + 2


def test_a_pair_with_a_split_backward():
    pair = Overlapped(Action(0, "F", 1), Action(0, "I", 0))
    order = (Action(0, "F", 0), pair, Action(0, "W", 0), Action(0, "B", 1))
    timeline = Schedule("pair", 2, (0,), (order,)).simulate(Costs(1, 2, 4, overlapped=5))
    assert timeline.makespan == 1 + (1 + 2) + 4 + 6, "overlapped is for whole backwards"


def test_transfers_between_ranks_only():
    timeline = build("dualpipe-v", 2, 4).simulate(Costs(1, 1, 1, transfer=1))
    # 4 stages have 3 boundaries, one of them inside rank 1; each is crossed both ways by 4 microbatches.
    assert len(timeline.transfers) == 2 * 2 * 4
    for transfer in timeline.transfers:
        assert transfer.source_rank != transfer.target_rank
        assert transfer.start == timeline.ends[transfer.source_rank][transfer.source]
        assert transfer.end == transfer.start + 1
        assert transfer.end <= timeline.starts[transfer.target_rank][transfer.target]


def test_an_invalid_schedule_is_not_simulated():
    schedule = Schedule("mine", 1, (0,), ((Action(0, "F", 0),),))
    with pytest.raises(ScheduleError, match="0B0 missing on rank 0"):
        schedule.simulate()


def test_costs_for_other_stages_are_refused():
    with pytest.raises(ScheduleError, match="forward has 2 values for 4 stages"):
        build("1f1b", 4, 8).simulate(Costs(forward=[1, 2]))


def test_a_recorded_run_has_the_plans_shape():
    schedule = build("1f1b", 2, 2)
    planned = schedule.simulate(Costs(1, 1, 1, transfer=1))
    late = [
        [(start + 10, end + 10) for start, end in zip(*rank, strict=True)]
        for rank in zip(planned.starts, planned.ends, strict=True)
    ]
    run = schedule.recorded(late)
    assert (run.makespan, run.span, run.busy) == (planned.makespan, planned.span, planned.busy)
    assert run.peak_activations == planned.peak_activations
    assert [span.name for span in run.spans[1]] == ["1F0", "1B0", "1F1", "1B1"]
    assert [transfer[:4] for transfer in run.transfers] == [transfer[:4] for transfer in planned.transfers]
    assert {transfer.end for transfer in run.transfers} == {None}


def test_a_recorded_run_of_other_steps_is_refused():
    with pytest.raises(ScheduleError, match=r"times of \[1, 0\] steps per rank, but the ranks ran \[4, 4\]"):
        build("1f1b", 2, 2).recorded([[(0, 1)], []])
