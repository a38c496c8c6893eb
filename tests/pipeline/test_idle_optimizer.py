"""An optimizer that changes none of a rank's parameters, or skips a step alone, is warned of, once."""

import copy
import gc
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import echelon
from echelon.data_parallel.idle_optimizer import _watching
from echelon.pipeline import Pipeline


def layers(group):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 * group.world_size)])


def train(pipe, *optimizers, steps=3, accumulate=1):
    for step in range(steps):
        pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        if step % accumulate == accumulate - 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def pipeline_of(model, group):
    return Pipeline(model, group, "1f1b", 2, nn.functional.mse_loss)


def on_rank_0(group, context):
    """What watches warnings is the whole process's, which simulated ranks share."""
    return context if group.rank == 0 else nullcontext()


def of_a_copy(group):
    model = layers(group)
    pipe = pipeline_of(copy.deepcopy(model), group)
    optimizer = torch.optim.Adam((model if group.rank == 0 else pipe).parameters())
    before = next(pipe.parameters()).detach().clone()
    seen = pytest.warns(
        UserWarning, match=r"rank 0: a step of Adam changed no parameter .* give the optimizer pipe\.pa"
    )
    with on_rank_0(group, seen) as caught:
        train(pipe, optimizer, steps=4)
    return len(caught or ()), torch.equal(next(pipe.parameters()), before)


def test_an_optimizer_of_another_model_is_warned_of_once(run):
    assert run(of_a_copy, 2) == [(1, True), (0, False)]


def good_ones(group, case):
    model = layers(group)
    other = nn.Linear(4, 4)
    pipe = pipeline_of(model, group)
    sgd = torch.optim.SGD
    with on_rank_0(group, warnings.catch_warnings(action="error")):
        if case == "its own":
            train(pipe, sgd(pipe.parameters(), lr=0.1))
        elif case == "whole model":  # whose parameters the stages are
            train(pipe, sgd(model.parameters(), lr=0.1))
        elif case == "one for each half":  # a rank has gradients for one of them
            halves = [sgd(model[: group.world_size].parameters(), lr=0.1), sgd(model[2:].parameters(), lr=0.1)]
            train(pipe, *(halves if group.rank else reversed(halves)))
        elif case == "another model beside it":  # as a discriminator has, while the pipeline's gradients add up
            optimizer, beside = sgd(pipe.parameters(), lr=0.1), sgd(other.parameters(), lr=0.1)
            for _ in range(3):
                other(torch.ones(1, 4)).sum().backward()
                beside.step()
                beside.zero_grad()
                train(pipe, steps=1)
            optimizer.step()
        elif case == "none yet":
            train(pipe)
    return next(pipe.parameters()).grad is None


@pytest.mark.parametrize("case", ["its own", "whole model", "one for each half", "another model beside it", "none yet"])
def test_there_is_no_false_alarm(run, case):
    assert len(run(good_ones, 2, case)) == 2


def scaled(group, scaler, overflows):
    """Trains with a scaler. The gradients of rank 0 overflow in the first step."""
    pipe = pipeline_of(layers(group), group)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    seen = warnings.catch_warnings(record=True, action="always") if group.rank == 0 else nullcontext()
    with seen as caught:
        for step in range(4):
            scaler.scale(torch.ones(()))
            pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
            if overflows and step == 0 and group.rank == 0:
                next(pipe.parameters()).grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [str(warning.message) for warning in caught or ()]


def of_torch(group):
    return scaled(group, torch.amp.GradScaler("cpu", init_scale=1), overflows=True)


def without_overflow(group):
    return scaled(group, torch.amp.GradScaler("cpu", init_scale=1), overflows=False)


def of_echelon(group):
    return scaled(group, echelon.amp.GradScaler(group, init_scale=1), overflows=True)


def test_a_step_that_one_rank_skips_is_warned_of_once(run):
    message = (
        "the optimizer of rank 1 made a step that rank 0 skipped, so their stages do not fit any more: in float16, use "
        "echelon.amp.GradScaler(group), whose ranks skip the same steps; if intended, freeze the parameters of rank 0"
    )
    assert run(of_torch, 2) == [[message], []]
    assert run(without_overflow, 2) == run(of_echelon, 2) == [[], []]


def watches_after(group):
    """A watch ends once an optimizer has changed a parameter, and with the pipeline."""
    pipe = pipeline_of(layers(group), group)
    watch = pipe._idle_optimizer
    begun = watch in _watching
    train(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1), steps=3)
    unused = weakref.ref(pipeline_of(layers(group), group)._idle_optimizer)
    gc.collect()
    return begun, watch in _watching, unused() is not None


def test_watching_ends(run):
    assert run(watches_after, 2) == [(True, False, False)] * 2


def wrapped_in_a_hook(group):
    """Makes and frees a pipeline and a DDP while torch iterates over the hooks of all optimizers."""

    def make(*_):
        pipeline_of(layers(group), group)
        echelon.DDP(nn.Linear(1, 1), group)
        gc.collect()

    # torch notices a change when it goes on to the next hook.
    hooks = [register_optimizer_step_post_hook(hook) for hook in (make, lambda *_: None)]
    try:
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    finally:
        for hook in hooks:
            hook.remove()
    return True


def test_hooks_of_optimizers_may_wrap_models():
    """Each watch had a global hook of its own: torch failed, as it did if one was freed at such a moment."""
    assert echelon.simulate(wrapped_in_a_hook, 1).results == [True]
