"""Stages may write to what they get, as layers of one model may."""

import pytest
import torch
from torch import nn

import echelon
from echelon.pipeline import Pipeline, schedules
from tests.helpers.models import gradients
from tests.helpers.named_schedules import sizes_of
from tests.helpers.one_process import make_batch, make_model, train_alone

TRAINING = [name for name in schedules.names() if name != "forward-only"]


class Scale(nn.Module):
    """Twice on the same memory is not the same as once."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place

    def forward(self, x):
        return x.mul_(3).relu_() if self.in_place else (x * 3).relu()


def stages_of(count, in_place):
    """Each begins with an operation in place, and ends with a layer that does not need its own output."""
    layers = list(make_model(count))[::2]
    return [nn.Sequential(Scale(in_place), layer, nn.Tanh(), nn.Linear(6, 6).double()) for layer in layers]


def same_stages(count, in_place):
    torch.manual_seed(0)
    return stages_of(count, in_place)


def train(group, name, recompute):
    schedule = schedules.build(name, *sizes_of(name, group.world_size, 4, 2))
    stages = same_stages(schedule.num_stages, True)
    pipe = Pipeline(stages, group, schedule, loss_fn=nn.functional.mse_loss, recompute=recompute)
    losses = []
    for _ in range(2):
        inputs, target = make_batch(2 * schedule.num_microbatches + 1)
        losses.append(pipe.step(inputs, target=target).loss)
    return losses, {name: parameter.grad for name, parameter in pipe.named_parameters()}, inputs


def assert_as_alone(name, results):
    ranks = len(results)
    schedule = schedules.build(name, *sizes_of(name, ranks, 4, 2))
    model = nn.Sequential(*same_stages(schedule.num_stages, False))
    batch = make_batch(2 * schedule.num_microbatches + 1)
    losses = [train_alone(model, batch, schedule.num_microbatches) for _ in range(2)]
    got = {name: gradient for _, rank, _ in results for name, gradient in rank.items()}
    for name, gradient in gradients(model).items():
        assert torch.equal(got[name], gradient), name
    for rank_losses, *_ in results:
        assert all(torch.equal(one, other) for one, other in zip(rank_losses, losses, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", TRAINING)
def test_every_schedule_trains_stages_that_begin_in_place(name, recompute):
    results = echelon.simulate(train, 2, (name, recompute), timeout=20.0, late_sends=True).results
    assert_as_alone(name, results)
    written = results[0][2]
    assert torch.equal(written, (make_batch(len(written))[0] * 3).relu()), "once, as in one process"


def test_and_so_do_processes(pool):
    assert_as_alone("zb-v", pool.run(train, 2, "zb-v", False))


class Adds(nn.Module):
    def forward(self, x):
        return x.add_(1)


def neighbours(group):
    """Stages 1 and 2 of a V on two ranks are one rank's; tanh needs what it made for its backward."""
    stages = [nn.Linear(6, 6).double(), nn.Tanh(), Adds(), nn.Linear(6, 6).double()]
    pipe = Pipeline(stages, group, "dualpipe-v", 4, nn.functional.mse_loss)
    try:
        pipe.step(make_batch(4)[0], target=make_batch(4)[1])
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def test_what_the_stage_before_needs_must_not_be_written_to():
    """As in one process, where torch notices it."""
    first, second = echelon.simulate(neighbours, 2, timeout=20.0).results
    assert second[0] == "RuntimeError"
    assert "was changed in place after the forward saved it" in second[1]
    assert first[0] == "PeerFailed"
