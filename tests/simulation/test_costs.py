"""Computing costs nothing, a fixed time, or what it took here; what was measured can be replayed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import echelon
from echelon.backends.formats.wire import Tag
from echelon.simulation import Measured, costs, meeting, values
from echelon.simulation.record import Recorder


def rounds(group):
    for _ in range(3):
        with group.backend.compute("forward"):
            torch.ones(200, 200) @ torch.ones(200, 200)
        with group.backend.compute("reduce"):
            group.all_reduce(torch.ones(10))
    return group.backend.now()


def test_computing_costs_nothing_by_default():
    assert echelon.simulate(rounds, 2).elapsed == 0


def test_names_have_costs_and_other_names_have_none():
    run = echelon.simulate(rounds, 2, costs={"forward": 0.5, "backward": 7.0})
    assert run.elapsed == 1.5
    assert run.timeline.steps[0] == ("forward", "reduce") * 3
    assert run.timeline.busy == (1.5, 1.5)


def test_a_function_of_rank_and_step_may_say_the_cost():
    run = echelon.simulate(rounds, 3, costs=lambda rank, step: rank * (step == "forward"))
    assert run.elapsed == 6.0
    assert run.timeline.starts[2][0] == 0
    assert run.timeline.ends[2][0] == 2.0


def train(group):
    torch.manual_seed(0)
    ddp = echelon.DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), group)
    for _ in range(3):
        ddp(torch.ones(64, 64)).square().mean().backward()
    return group.backend.now()


def test_measured_costs_are_cpu_time_and_replay_exactly():
    network = echelon.Network(latency=1e-5, bandwidth=1e9)
    first = echelon.simulate(train, 3, network=network, costs="measured")
    assert first.measurements is not None
    assert all(0 < first.measurements.total(rank) <= first.elapsed * 4 for rank in range(3))
    replayed = echelon.simulate(train, 3, network=network, costs=first.measurements)
    assert replayed.trace == first.trace
    assert replayed.elapsed == first.elapsed
    assert replayed.measurements == first.measurements


def spin(group):
    total = 0
    for number in range(200_000):
        total += number
    group.barrier()


def test_measured_times_take_a_factor():
    slow = echelon.simulate(spin, 2, costs=Measured(factor=1000.0))
    assert slow.elapsed > 1.0
    assert slow.elapsed == pytest.approx(max(slow.measurements.total(rank) for rank in range(2)), rel=0.5)


def test_measured_computing_is_a_span_and_not_idle_time():
    timeline = echelon.simulate(spin, 2, costs=Measured(factor=1000.0)).timeline
    for rank in range(2):
        first, *_ = zip(timeline.steps[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
        assert first == ("compute", 0.0, pytest.approx(timeline.busy[rank], rel=0.5))


def test_measured_computing_goes_on_until_something_happens():
    recorder = Recorder(2)
    recorder.computed(0, 0.0, 1.0)
    recorder.computed(0, 1.0, 2.0)
    recorder.computed(0, 2.0, 2.0)
    recorder.sent(0, 1, Tag(0, 0, 0), 2.0, 3.0)
    recorder.computed(0, 2.0, 4.0)
    recorder.span(0, "all_reduce", 4.0, 5.0)
    recorder.computed(0, 5.0, 6.0)
    timeline = recorder.timeline()
    assert timeline.steps[0] == ("compute", "compute", "all_reduce", "compute")
    assert timeline.starts[0] == (0.0, 2.0, 4.0, 5.0)
    assert timeline.ends[0] == (2.0, 4.0, 5.0, 6.0)


def test_measured_computing_of_a_step_is_that_step():
    def compute(group):
        with group.backend.compute("forward"):
            spin(group)

    simulation = echelon.simulate(compute, 1, costs=Measured(factor=1000.0))
    timeline = simulation.timeline
    number = timeline.steps[0].index("forward")
    assert timeline.ends[0][number] - timeline.starts[0][number] > 0.5 * simulation.elapsed
    assert sum(timeline.busy) <= simulation.elapsed * (1 + 1e-9), "no time counts twice"


@pytest.mark.parametrize("seed", range(3))
def test_spans_of_measured_computing_overlap_no_others(seed):
    network = echelon.Network(latency=1e-5, bandwidth=1e9)
    timeline = echelon.simulate(train, 3, network=network, costs="measured", seed=seed).timeline
    for starts, ends in zip(timeline.starts, timeline.ends, strict=True):
        assert all(end <= start for end, start in zip(ends[:-1], starts[1:], strict=True))
    assert all("compute" in steps for steps in timeline.steps)
    assert timeline.critical_path


def test_measurements_of_another_program_are_refused():
    short = echelon.simulate(spin, 3, costs="measured").measurements
    with pytest.raises(echelon.LaunchError, match="makes more calls than were measured"):
        echelon.simulate(train, 3, costs=short)


@pytest.mark.parametrize("costs", ["guessed", 3.0])
def test_costs_that_are_none_are_refused(costs):
    with pytest.raises(echelon.LaunchError, match="use Costs"):
        echelon.simulate(spin, 2, costs=costs)


def test_negative_costs_are_refused():
    with pytest.raises(echelon.LaunchError, match="at least 0"):
        echelon.simulate(spin, 2, costs={"forward": -1.0})


@pytest.mark.parametrize("collectives", ["whole", "messages"])
def test_the_work_of_the_simulation_in_a_collective_takes_no_time(monkeypatch, collectives):
    clock = [0.0]
    monkeypatch.setattr(costs, "time", SimpleNamespace(thread_time=lambda: clock[0]))
    for owner, name in ((meeting.Meeting, "take"), (values.Inputs, "total")):
        original = getattr(owner, name)

        def slow(*args, original=original):
            clock[0] += 100.0
            return original(*args)

        monkeypatch.setattr(owner, name, slow)

    def program(group):
        clock[0] += 1.0
        assert group.all_reduce(torch.ones(4)).tolist() == [2.0] * 4
        return group.backend.now()

    assert echelon.simulate(program, 2, costs="measured", collectives=collectives).results == [1.0, 1.0]
    assert clock[0] >= 102.0
