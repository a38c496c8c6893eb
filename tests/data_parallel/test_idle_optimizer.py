"""An optimizer of another model than the one in DDP is warned of, once; others are not."""

import copy
import warnings

import pytest
import torch
from torch import nn

import echelon


def train(group, kind):
    model = nn.Linear(2, 2)
    other = copy.deepcopy(model)
    ddp = echelon.DDP(model, group)
    parameters = {"other": other.parameters, "own": ddp.parameters, "before": model.parameters}[kind.split()[0]]()
    optimizers = [torch.optim.SGD(parameters, 0.1)]
    if kind == "other beside":
        optimizers.append(torch.optim.SGD(ddp.parameters(), 0.1))
    if kind == "other trained":
        other(torch.ones(2, 2)).sum().backward()
    if kind == "own sharded":
        optimizers = [echelon.ZeroOptimizer(torch.optim.SGD, ddp.parameters(), group, lr=0.1)]
    for step in range(4):
        ddp(torch.full((4, 2), float(group.rank + 2 * step))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        ddp.zero_grad()


def test_an_optimizer_of_another_model_is_warned_of_once_by_each_rank():
    with pytest.warns(UserWarning, match=r"rank \d: a step of SGD changed no parameter of the model in DDP") as caught:
        echelon.simulate(train, 2, ("other",))
    assert sorted(str(each.message)[:7] for each in caught) == ["rank 0:", "rank 1:"]
    assert {each.filename for each in caught} == {__file__}


@pytest.mark.parametrize("kind", ["own", "before", "other beside", "other trained", "own sharded"])
def test_others_are_not(kind):
    with warnings.catch_warnings(action="error"):
        echelon.simulate(train, 2, (kind,))
