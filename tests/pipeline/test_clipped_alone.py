"""Gradients that are clipped by the norm of one rank's stages are warned of, once."""

import warnings

import pytest
import torch
from torch import nn

import echelon
from echelon.pipeline import Pipeline
from echelon.pipeline.run.clipped_alone import _watching


def told(group, how, limit=0.5):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    pipe = Pipeline(model, group, "1f1b", 4, nn.functional.mse_loss)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    data = 3 * torch.randn(16, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            optimizer.zero_grad()
            pipe.step(data, target=data)
            if how == "torch":
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            elif how == "pipeline":
                pipe.clip_grad_norm_(limit)
            elif how == "factor":
                for parameter in pipe.parameters():
                    parameter.grad.mul_(0.37)
            elif how == "unscaled":
                scaler.scale(torch.ones(()))  # makes the scale
                scaler.unscale_(optimizer)
                scaler.update()
            optimizer.step()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("limit", [0.5, 0.25, 0.3])
def test_clipping_by_torch_is_told(limit):
    """Loss and weights went another way than in one process, without a word."""
    for rank, found in enumerate(echelon.simulate(told, 2, args=("torch", limit)).results):
        assert len(found) == 1
        assert f"rank {rank}: the gradients of this rank's stages were scaled to a norm of {limit}" in found[0]
        assert "call pipe.clip_grad_norm_(max_norm)" in found[0]


@pytest.mark.parametrize("how", ["pipeline", "factor", "unscaled", "nothing"])
def test_other_steps_are_not(how):
    assert echelon.simulate(told, 2, args=(how,)).results == [[], []]


def test_one_rank_may_use_torch():
    assert echelon.simulate(told, 1, args=("torch",)).results == [[]]


def updated_by_hand(group):
    pipe = Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), group, "1f1b", 2, nn.functional.mse_loss)
    watch = pipe._weights._clipped_alone
    data = torch.ones(4, 4)
    for _ in range(4):
        pipe.step(data, target=2 * data)
    return watch in _watching


def test_the_watch_ends_where_no_optimizer_steps(monkeypatch):
    monkeypatch.setattr("echelon.pipeline.run.clipped_alone._MOST_NORMS", 10)
    assert echelon.simulate(updated_by_hand, 2).results == [True, True]
    monkeypatch.setattr("echelon.pipeline.run.clipped_alone._MOST_NORMS", 3)
    assert echelon.simulate(updated_by_hand, 2).results == [False, False]
