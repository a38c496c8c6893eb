"""Dropout belongs to step, stage and microbatch: the same under every schedule, and in one process."""

import pytest
import torch
from torch import nn

import echelon
from echelon.pipeline import Pipeline, keyed
from echelon.pipeline.stage.replay import Key, number_of
from tests.helpers.one_process import make_batch, make_model

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")


def make_stages():
    layers = make_model(4)
    return [nn.Sequential(*layers[2 * index : 2 * index + 2], nn.Dropout(0.5)) for index in range(4)]


def train(group, schedule, recompute=False, replicas=1):
    mesh = echelon.Mesh(group, dp=replicas, pp=group.world_size // replicas)
    data_parallel = mesh["dp"] if replicas > 1 else None
    stages = make_stages()
    torch.manual_seed(group.rank)
    state = torch.get_rng_state()
    pipe = Pipeline(
        stages,
        mesh["pp"],
        schedule,
        4,
        nn.functional.mse_loss,
        seed=7,
        recompute=recompute,
        data_parallel=data_parallel,
    )
    inputs, target = make_batch(8)
    losses = []
    for _ in range(2):
        losses.append(pipe.step(inputs, target=target).loss)
        pipe.forward(inputs)  # does not count
    assert torch.equal(torch.get_rng_state(), state)
    return losses, {name: p.grad for name, p in pipe.named_parameters()}


def train_alone(replica=0):
    """What docs/train_pipeline.md shows."""
    stages = make_stages()
    losses = []
    for step in range(2):
        total = 0
        inputs, target = make_batch(8)
        for microbatch, (value, y) in enumerate(zip(inputs.chunk(4), target.chunk(4), strict=True)):
            for index, stage in enumerate(stages):
                with keyed(step, index, microbatch, seed=7, replica=replica):
                    value = stage(value)
            loss = nn.functional.mse_loss(value, y) / 4
            loss.backward()
            total += loss.detach()
        losses.append(total)
    return losses, {name: p.grad for name, p in nn.Sequential(*stages).named_parameters()}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", [False, True])
def test_every_schedule_draws_what_one_process_draws(schedule, recompute):
    ranks = 4 if schedule in ("gpipe", "1f1b", "zb-h1") else 2
    if schedule == "dualpipe-v":
        ranks = 2
    results = echelon.simulate(train, ranks, (schedule, recompute), timeout=20.0, late_sends=True).results
    losses, gradients = train_alone()
    assert losses[0] != losses[1]
    for got, mine in results:
        assert got == losses
        for name, gradient in mine.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=1e-14)


def test_processes_draw_the_same(pool):
    losses, _ = train_alone()
    for got, _ in pool.run(train, 2, "interleaved-1f1b"):
        assert got == losses


def test_replicas_draw_different_numbers():
    results = echelon.simulate(train, 4, ("interleaved-1f1b", False, 2), timeout=20.0, late_sends=True).results
    expected = [(train_alone(0)[0][step] + train_alone(1)[0][step]) / 2 for step in range(2)]
    for losses, _ in results:
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
    assert train_alone(0)[0] != train_alone(1)[0]


def go_on(group, num_steps):
    pipe = Pipeline(make_stages()[:2], group, "1f1b", 2, nn.functional.mse_loss)
    pipe.num_steps = num_steps
    return [pipe.step(make_batch(4)[0], target=make_batch(4)[1]).loss for _ in range(2)]


def test_a_run_can_go_on_where_another_ended():
    first = echelon.simulate(go_on, 2, (0,)).results[0]
    later = echelon.simulate(go_on, 2, (1,)).results[0]
    assert first[1] == later[0]
    assert first[0] != later[1]


def test_a_key_gives_the_same_numbers_and_leaves_no_trace():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    draws = {}
    for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]:
        with keyed(*key):
            draws.setdefault(key, []).append(torch.rand(3).tolist())
    assert draws[0, 0, 0][0] == draws[0, 0, 0][1]
    assert len({tuple(values[0]) for values in draws.values()}) == 4
    with pytest.raises(ZeroDivisionError), keyed(3):
        torch.rand(1) / (1 // 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_draws_the_same_with_a_later_version():
    assert number_of(Key(seed=7, step=3, replica=4), stage=2, microbatch=1) == 517623057905095241


def test_keys_can_be_nested():
    with keyed(1):
        torch.rand(2)
        expected = torch.rand(2)
    with keyed(1):
        torch.rand(2)
        with keyed(2):
            torch.rand(5)
        assert torch.equal(torch.rand(2), expected)
