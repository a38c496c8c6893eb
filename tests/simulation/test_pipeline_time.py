"""A pipeline with fixed action costs takes exactly the time that its simulated schedule says."""

import math

import pytest
import torch
from torch import nn

import echelon
from echelon.pipeline import Costs, Pipeline, schedules

COSTS = Costs(forward=1.0, backward_input=1.5, backward_weight=0.5)
BYTES = 2 * 4 * 4
"""Of one microbatch between two stages."""


def step(group, name, num_microbatches, num_chunks):
    layers = [nn.Linear(4, 4) for _ in range(group.world_size * num_chunks)]
    pipe = Pipeline(
        nn.Sequential(*layers), group, name, num_microbatches, nn.functional.mse_loss, num_chunks=num_chunks
    )
    batch = torch.linspace(-1, 1, 8 * num_microbatches).view(-1, 4)
    pipe.step(batch, target=batch)
    return pipe.timeline


def times(timeline):
    return [[time - timeline.start for time in rank] for rank in (*timeline.starts, *timeline.ends)]


@pytest.mark.parametrize("transfer", [0.0, 0.25, 4.0])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(("name", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2)])
@pytest.mark.parametrize("factor", [1, 2])
def test_every_action_runs_when_the_plan_says(name, num_chunks, num_ranks, transfer, factor):
    num_microbatches = factor * num_ranks
    network = echelon.Network(latency=transfer / 2, bandwidth=BYTES / (transfer / 2) if transfer else math.inf)
    if transfer > 1:  # one transfer must not hold up the next: latency does not
        network = echelon.Network(latency=transfer, bandwidth=math.inf)
    run = echelon.simulate(step, num_ranks, (name, num_microbatches, num_chunks), network=network, costs=COSTS)
    schedule = schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    planned = schedule.simulate(Costs(forward=1.0, backward_input=1.5, backward_weight=0.5, transfer=transfer))
    for measured in run.results:
        assert measured.steps == planned.steps
        assert measured.makespan == pytest.approx(planned.makespan, rel=1e-14)
        for got, expected in zip(times(measured), times(planned), strict=True):
            assert got == pytest.approx(expected, rel=1e-13, abs=1e-13)


@pytest.mark.parametrize("by_stage", [{"forward": [1.0, 3.0, 2.0]}, {"activation": [1, 2, 3]}, {"transfer": [0, 0]}])
def test_costs_may_differ_by_stage(by_stage):
    costs = Costs(backward_input=1.0, backward_weight=1.0, **by_stage)
    run = echelon.simulate(step, 3, ("1f1b", 5, 1), costs=costs)
    planned = schedules.build("1f1b", num_ranks=3, num_microbatches=5).simulate(costs)
    assert run.results[0].makespan == planned.makespan


def test_the_timeline_of_the_simulation_has_the_actions_and_their_transfers():
    network = echelon.Network(latency=0.5, bandwidth=math.inf)
    run = echelon.simulate(step, 2, ("1f1b", 2, 1), network=network, costs=COSTS)
    planned = schedules.build("1f1b", num_ranks=2, num_microbatches=2).simulate(
        Costs(forward=1.0, backward_input=1.5, backward_weight=0.5, transfer=0.5)
    )
    for rank, spans in enumerate(run.timeline.spans):
        actions = [span for span in spans if not str(span.step).startswith(("all", "broad"))]
        assert [str(span.step) for span in actions] == [str(action) for action in planned.steps[rank]]
        assert [span.duration for span in actions] == [span.duration for span in planned.spans[rank]]
    named = {
        (
            str(run.timeline.steps[transfer.source_rank][transfer.source]),
            str(run.timeline.steps[transfer.target_rank][transfer.target]),
        )
        for transfer in run.timeline.transfers
    }
    assert named == {("0F0", "1F0"), ("0F1", "1F1"), ("1B0", "0B0"), ("1B1", "0B1")}
    assert all(transfer.end - transfer.start == 0.5 for transfer in run.timeline.transfers)


def test_a_slow_rank_computes_slower():
    run = echelon.simulate(step, 2, ("gpipe", 2, 1), costs=COSTS, faults=[echelon.Slow(rank=1, factor=2)])
    costs = Costs(forward=[1.0, 2.0], backward_input=[1.5, 3.0], backward_weight=[0.5, 1.0])
    planned = schedules.build("gpipe", num_ranks=2, num_microbatches=2).simulate(costs)
    assert run.results[0].makespan == planned.makespan


def test_a_pause_makes_what_is_computed_end_later():
    run = echelon.simulate(step, 2, ("gpipe", 2, 1), costs=COSTS, faults=[echelon.Pause(rank=0, start=0.5, end=10.5)])
    planned = schedules.build("gpipe", num_ranks=2, num_microbatches=2).simulate(COSTS)
    assert run.results[0].makespan == planned.makespan + 10


def test_transfers_are_priced_by_the_network():
    with pytest.raises(echelon.LaunchError, match="use transfer=0 and network="):
        echelon.simulate(step, 2, ("gpipe", 2, 1), costs=Costs(transfer=1.0))
