"""A load takes memory for one tensor at most beside the model and the optimizer."""

import pytest
import torch
from torch import nn

import echelon
from echelon.checkpoint import Store
from tests.helpers.models import fill

WIDTH = 256
BYTES = WIDTH * WIDTH * 4
"""Bytes of each weight."""


def make(transposed):
    model = fill(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))))
    if transposed:
        for layer in model:
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return model


def load(group, zero, transposed, path):
    model = make(transposed)
    optimizer = torch.optim.AdamW
    made = echelon.ZeroOptimizer(optimizer, model.parameters(), group) if zero else optimizer(model.parameters())
    if path:
        assert Store(path, group=group).load(model=model, optimizer=made) == 1


def peak(*arguments, ranks):
    # Without the load, the garbage of building the model is in the peak of both.
    return max(echelon.simulate(load, ranks, arguments, memory=True).peak_memory)


@pytest.mark.parametrize(("zero", "transposed", "extra"), [(False, False, 0), (False, True, 1), (True, False, 0)])
def test_a_load_takes_one_tensor_at_most(zero, transposed, extra, tmp_path):
    model = make(False)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    Store(tmp_path).save(1, model=model, optimizer=optimizer)
    ranks = 2 if zero else 1
    state = 2 * 8 * BYTES // ranks
    small = 64 * 1024  # random states, names, steps
    assert peak(zero, transposed, str(tmp_path), ranks=ranks) <= 8 * BYTES + state + extra * BYTES + small
