"""torch's own DistributedDataParallel on Gloo as the yardstick: the same gradients on the same ranks."""

import pytest
import torch
from torch import nn

from echelon import DDP
from tests.helpers.models import TINY_MB, Branches, Shared, backward, batch, fill, gradients, loss_of, mlp, part
from tests.helpers.torch_groups import gloo

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="this torch was built without Gloo, which is the yardstick"
)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 2)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        features = torch.relu(self.norm(self.conv(x.view(-1, 1, 2, 2))))
        return self.head(features.flatten(1))


MODELS = {"mlp": mlp, "shared": lambda: fill(Shared()), "conv": lambda: fill(ConvNet())}


def train(model, group):
    """Three steps with momentum; the second accumulates over two backwards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = []
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            with model.no_sync():
                backward(model, group, 10)
        backward(model, group, step)
        history.append(gradients(model))
        optimizer.step()
    return history, model.state_dict()


def both(group, name, path):
    ours = train(DDP(MODELS[name](), group, bucket_mb=TINY_MB), group)
    with gloo(group, path):
        theirs = train(nn.parallel.DistributedDataParallel(MODELS[name](), bucket_cap_mb=1), group)
    return ours, theirs


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_states_are_those_of_torch(pool, tmp_path, name):
    for ours, theirs in pool.run(both, 2, name, str(tmp_path / "store")):
        for mine, other in zip(ours[0], theirs[0], strict=True):
            assert mine.keys() == {key.removeprefix("module.") for key in other}
            for key, value in mine.items():
                torch.testing.assert_close(value, other[f"module.{key}"], rtol=1e-6, atol=1e-6)
        for key, value in ours[1].items():
            torch.testing.assert_close(value, theirs[1][f"module.{key}"], rtol=1e-6, atol=1e-6)


def unused_and_frozen(model, group):
    """One layer is used by one rank, one by none, one is frozen."""
    loss_of(model(part(batch(), group), group.rank == 0)).backward()
    return gradients(model)


def frozen_branches():
    module = fill(Branches())
    module.trunk.bias.requires_grad_(False)
    return module


def both_with_unused(group, path):
    ours = unused_and_frozen(DDP(frozen_branches(), group, bucket_mb=TINY_MB), group)
    with gloo(group, path):
        wrapped = nn.parallel.DistributedDataParallel(frozen_branches(), find_unused_parameters=True)
        theirs = unused_and_frozen(wrapped, group)
    return ours, theirs


def test_unused_and_frozen_parameters_are_those_of_torch(pool, tmp_path):
    for ours, theirs in pool.run(both_with_unused, 2, str(tmp_path / "store")):
        for name, value in ours.items():
            other = theirs[f"module.{name}"]
            assert (value is None) == (other is None)
            if value is not None:
                torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-6)
