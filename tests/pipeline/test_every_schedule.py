"""Every schedule trains as one process does: bit for bit where each stage keeps to the order of the microbatches."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import nn

import echelon
from echelon.pipeline import Costs, Pipeline, Schedule, schedules
from echelon.pipeline.plan.action import Action
from echelon.pipeline.plan.fuse import exact_stages, is_exact
from tests.helpers.grids import covering
from tests.helpers.models import gradients
from tests.helpers.named_schedules import schedules as schedules_of
from tests.helpers.named_schedules import sizes_of
from tests.helpers.one_process import make_batch, make_model, train_alone
from tests.pipeline.test_halves import Products

TRAINING = [name for name in schedules.names() if name != "forward-only"]
NUM_LAYERS = 8


def train(group, schedule, dtype, num_samples):
    pipe = Pipeline(make_model(NUM_LAYERS, dtype), group, schedule, loss_fn=nn.functional.mse_loss)
    inputs, target = make_batch(num_samples, dtype)
    losses = []
    for _ in range(2):
        out = pipe.step(inputs if pipe.is_first else None, target=target if pipe.is_last else None)
        losses.append(out.loss)
    assert all(stage.num_held == 0 for stage in pipe.stages)
    assert pipe.timeline.steps == schedule.orders
    return losses, {name: parameter.grad for name, parameter in pipe.named_parameters()}


def expected(dtype, num_samples, num_microbatches):
    model = make_model(NUM_LAYERS, dtype)
    losses = [train_alone(model, make_batch(num_samples, dtype), num_microbatches) for _ in range(2)]
    return losses, gradients(model)


def assert_equal_to_alone(results, schedule, dtype, num_samples, same_bits=True):
    losses, alone = expected(dtype, num_samples, schedule.num_microbatches)
    got = {name: gradient for _, rank in results for name, gradient in rank.items()}
    assert got.keys() == alone.keys()
    for name, gradient in alone.items():
        if same_bits:
            assert torch.equal(got[name], gradient), name
        else:
            torch.testing.assert_close(got[name], gradient)
    for rank_losses, _ in results:
        for one, other in zip(rank_losses, losses, strict=True):
            assert torch.equal(one, other)


def named(name, num_ranks, num_microbatches):
    return schedules.build(name, *sizes_of(name, num_ranks, num_microbatches, 2))


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize(("num_ranks", "dtype"), covering([1, 2, 4], [torch.float64, torch.float32]))
def test_gradients_are_those_of_one_process(name, num_ranks, dtype):
    schedule = named(name, num_ranks, 5 if "interleaved" not in name else 8)
    num_samples = 2 * schedule.num_microbatches + 1
    run = echelon.simulate(train, num_ranks, (schedule, dtype, num_samples), timeout=20.0, late_sends=True)
    assert is_exact(schedule)
    assert_equal_to_alone(run.results, schedule, dtype, num_samples)


def count_products(group, name):
    schedule = named(name, 2, 4)
    pipe = Pipeline(make_model(NUM_LAYERS), group, schedule, loss_fn=nn.functional.mse_loss)
    inputs, target = make_batch(schedule.num_microbatches)
    pipe.step(inputs, target=target)  # the first one tries I and W
    with Products() as products:
        pipe.step(inputs, target=target)
    return products.counts["product"]


@pytest.mark.parametrize("name", TRAINING)
def test_a_step_does_the_products_of_one_process_and_no_more(name):
    """For each microbatch: a forward and the weight's gradient of all layers, the input's of all but the first."""
    counts = echelon.simulate(count_products, 2, (name,), timeout=20.0).results
    assert sum(counts) == 4 * (3 * NUM_LAYERS - 1)


@given(schedules_of(max_ranks=8, max_microbatches=32, among=tuple(TRAINING)))
def test_every_named_schedule_keeps_to_the_order_of_the_microbatches(schedule):
    assert is_exact(schedule)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe-v"])
def test_gradients_are_those_of_one_process_on_processes(pool, name):
    schedule = named(name, 2, 4)
    results = pool.run(train, 2, schedule, torch.float64, 9)
    assert_equal_to_alone(results, schedule, torch.float64, 9)


def test_a_searched_schedule_and_one_from_a_file_run(tmp_path):
    searched = schedules.search(Costs(1, 1, 1), num_ranks=2, num_microbatches=4, memory_limit=2)
    searched.to_csv(tmp_path / "searched.csv")
    for schedule in (searched, Schedule.from_csv(tmp_path / "searched.csv")):
        run = echelon.simulate(train, 2, (schedule, torch.float64, 8), timeout=20.0, late_sends=True)
        assert_equal_to_alone(run.results, schedule, torch.float64, 8, is_exact(schedule))


def test_a_schedule_with_weights_out_of_order_is_right_within_rounding():
    schedule = named("zb-h1", 2, 4)
    orders = [list(order) for order in schedule.orders]
    first, last = (orders[0].index(Action(0, "W", number)) for number in (0, 3))
    orders[0].insert(last, orders[0].pop(first))
    schedule = replace(schedule, orders=tuple(map(tuple, orders)))
    schedule.check()
    assert exact_stages(schedule) == (False, True)
    run = echelon.simulate(train, 2, (schedule, torch.float64, 9), timeout=20.0, late_sends=True)
    assert_equal_to_alone(run.results, schedule, torch.float64, 9, same_bits=False)


def train_replicated(group, name, no_sync):
    mesh = echelon.Mesh(group, dp=2, pp=2)
    schedule = named(name, 2, 4)
    pipe = Pipeline(
        make_model(NUM_LAYERS), mesh["pp"], schedule, loss_fn=nn.functional.mse_loss, data_parallel=mesh["dp"]
    )
    inputs, target = (tensor[mesh.coordinates["dp"] :: 2] for tensor in make_batch(8))
    if no_sync:
        with pipe.no_sync():
            pipe.step(inputs, target=target)
    pipe.step(inputs, target=target)
    return {name: parameter.grad for name, parameter in pipe.named_parameters()}


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "v-min", "dualpipe-v"])
def test_replicas_average_every_stage_under_every_schedule(name, no_sync):
    """An earlier system skipped all stages but one under zero-bubble schedules, silently."""
    results = echelon.simulate(train_replicated, 4, (name, no_sync), timeout=20.0, late_sends=True).results
    model = make_model(NUM_LAYERS)
    for _ in range(1 + no_sync):
        train_alone(model, make_batch(8), 1)
    for replica in (results[:2], results[2:]):
        got = {name: gradient for rank in replica for name, gradient in rank.items()}
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-12, atol=1e-14)
