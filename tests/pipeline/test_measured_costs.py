"""Costs of stages, measured by a step of a pipeline and taken by plans."""

from operator import add

import pytest
import torch
from torch import nn

import echelon
from echelon.errors import ScheduleError
from echelon.pipeline import Costs, Pipeline, Schedule, schedules
from echelon.pipeline.plan.action import Action, Overlapped
from echelon.pipeline.plan.simulate import measured_costs, recorded
from echelon.timeline.timeline import Timeline, Transfer

LINK = echelon.Network(latency=0.25, bandwidth=1e12)


def measure(group, name, num_chunks=1, recompute=False):
    layers = [nn.Linear(8, 8) for _ in range(group.world_size * num_chunks)]
    pipe = Pipeline(layers, group, name, 8, nn.functional.mse_loss, recompute=recompute)
    batch = torch.ones(16, 8)
    for _ in range(2):
        pipe.step(batch, target=batch)
    return pipe.costs(), pipe.timeline


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe-v"])
def test_a_step_measures_the_costs_that_it_was_given(name):
    count = 4 * schedules.build(name, 4, 8).num_chunks
    given = Costs([1 + stage / 8 for stage in range(count)], [1.5] * count, [stage / 4 for stage in range(count)])
    outcomes = echelon.simulate(measure, 4, (name, count // 4), costs=given, network=LINK).results
    costs, timeline = outcomes[0]
    assert all(found == costs for found, _ in outcomes)
    for found, expected in (
        (costs.forward, given.forward),
        (costs.backward_input, given.backward_input),
        (costs.backward_weight, given.backward_weight),
        (costs.transfer, 0.25),
    ):
        assert found == pytest.approx(expected, rel=1e-6)
    # A plan with these costs takes as long as the step.
    assert float(schedules.build(name, 4, 8).simulate(costs).span) == pytest.approx(float(timeline.span), rel=1e-6)


def test_plans_take_measured_costs():
    costs, _ = echelon.simulate(measure, 4, ("zb-h1",), costs=Costs(1.0, 2.0, 1.0), network=LINK).results[0]
    options = schedules.recommend(costs, num_ranks=4, num_microbatches=16, capacity=10_000)
    spans = {option.schedule.name: option.timeline.span for option in options if option.fits}
    assert spans["zb-v"] < spans["zb-h1"] < spans["1f1b"]
    searched = schedules.search(costs, num_ranks=4, num_microbatches=8)
    assert searched.simulate(costs).span <= schedules.build("zb-h1", 4, 8).simulate(costs).span
    # An activation is the input of the layer, 2 samples of 8 floats. W keeps the gradient of its output, too.
    assert (costs.activation[1], costs.weight_activation[1]) == (64, 128)


def test_a_plan_with_measured_costs_is_in_seconds_and_bytes_as_the_step_is():
    costs, measured = echelon.simulate(measure, 4, ("zb-h1",), costs=Costs(1.0, 2.0, 1.0), network=LINK).results[0]
    planned = schedules.build("zb-h1", 4, 8).simulate(costs)
    for timeline in planned, measured, schedules.recommend(costs, 4, 8)[0].timeline:
        assert (timeline.unit, timeline.memory_unit) == ("s", "B")
    # Rank 0 runs views of the batch, which do not count. Each other holds 64 bytes until I, and 128 until W.
    peaks = "peak activations 64 B, 384 B, 448 B, 512 B"
    assert peaks in str(planned)
    assert peaks in str(measured)


def test_half_of_a_whole_backward_counts_as_each_gradient():
    costs, _ = echelon.simulate(measure, 2, ("1f1b",), costs=Costs(1.0, 2.0, 1.0), network=LINK).results[0]
    # The first stage sends no gradient.
    assert costs.backward_input == pytest.approx((0, 1.5))
    assert costs.backward_weight == pytest.approx((3, 1.5))
    assert costs.weight_activation == costs.activation


def test_activations_that_a_whole_backward_recomputes_count_as_held_until_w():
    costs, _ = echelon.simulate(measure, 4, ("1f1b", 1, True)).results[0]
    assert costs.recomputed_activation[3] > 0
    assert costs.weight_activation == tuple(map(add, costs.activation, costs.recomputed_activation))


def by_hand(group):
    pipe = Pipeline([nn.Linear(8, 8) for _ in range(2)], group, "zb-h1", 4, nn.functional.mse_loss)
    batch = torch.ones(16, 8)
    output = pipe.forward(batch, train=True)
    pipe.backward(torch.ones_like(output) if pipe.is_last else None)
    pipe.step(batch, target=batch)
    return pipe.costs()


def test_memory_of_a_backward_by_hand_is_held_until_w():
    costs = echelon.simulate(by_hand, 2).results[0]
    assert costs.weight_activation == costs.activation
    assert costs.activation[1] > 0


def test_an_overlapped_step_takes_all_of_a_backward_that_was_split():
    apart = tuple(Action(0, kind, 0) for kind in "FIW")
    pair = Action(1, "F", 0), Overlapped(Action(1, "F", 1), Action(1, "B", 0)), Action(1, "B", 1)
    timeline = Timeline(steps=(apart, pair), starts=((0, 1, 3), (0, 1, 4)), ends=((1, 3, 7), (1, 4, 6)), name="pairs")
    costs = measured_costs(timeline, Costs(activation=[1, 1], weight_activation=[1, 1]))
    assert costs.overlapped == (1 + 2 + 4, 3)


def test_processes_measure_seconds(pool):
    outcomes = pool.run(measure, 2, "zb-h1")
    costs = outcomes[0][0]
    assert costs == outcomes[1][0]
    assert all(0 < seconds < 10 for seconds in (*costs.forward, *costs.backward_weight))
    assert 0 <= costs.transfer < 10


def test_there_are_none_before_a_step():
    def costs_of(group):
        Pipeline([nn.Linear(8, 8)], group, "1f1b", 2, nn.functional.mse_loss).costs()

    with pytest.raises(ScheduleError, match=r"call step\(\) first"):
        echelon.simulate(costs_of, 1)


def test_a_stage_that_only_overlaps_has_none():
    pair = Overlapped(Action(0, "F", 1), Action(0, "B", 0))
    timeline = Timeline(steps=((Action(0, "F", 0), pair),), starts=((0, 1),), ends=((1, 3),), name="pairs")
    with pytest.raises(ScheduleError, match="stage 0 ran no forward, or no backward, alone in pairs: run a step with"):
        measured_costs(timeline, Costs(activation=[1], weight_activation=[1]))


def test_transfers_that_nobody_awaited_do_not_count():
    schedule = Schedule.from_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    activations = Costs(activation=[1, 1], weight_activation=[1, 1])
    # Rank 1 begins late, at 5. It awaits nothing: its second forward was there long ago. Rank 0 awaits the gradients:
    # one for 0.5 after it left at 7, one for 0.25.
    times = [[(0, 1), (1, 2), (7.5, 8), (9.25, 10)], [(5, 6), (6, 7), (7, 8), (8, 9)]]
    timeline = recorded(schedule, times, Costs())
    assert Transfer(1, 1, 0, 2, 7, None) in list(timeline.transfers)
    assert measured_costs(timeline, activations).transfer == pytest.approx(0.375)
    # Nobody waits for anybody here.
    times = [[(0, 1), (1, 2), (8, 9), (12, 13)], [(5, 6), (6, 7), (7, 8), (8, 9)]]
    early = [[(0, 1), (1, 7.5), (8, 9.5), (12, 13)], times[1]]
    assert measured_costs(recorded(schedule, early, Costs()), activations).transfer == 0
