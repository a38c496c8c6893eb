"""Small models for data parallelism, their batches and gradients, the same in every process.

None draws from torch's random state, which simulated ranks share.
"""

import torch
from torch import nn

TINY_MB = 1e-4
"""About 100 bytes: nearly every layer of the small models gets a bucket of its own, and some are larger."""

BATCH = 12
"""Samples in the global batch: divides evenly over 1, 2, 3 and 4 ranks."""


def fill(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def mlp(seed=0):
    return fill(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)), seed)


class Branches(nn.Module):
    """Has a layer that only some inputs reach, and one that none does."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 3)
        self.branch = nn.Linear(3, 3)
        self.idle = nn.Linear(3, 3)

    def forward(self, x, take_branch):
        hidden = self.trunk(x)
        return self.branch(hidden) if take_branch else hidden


class Shared(nn.Module):
    """Uses one parameter twice, under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def batch(seed=100):
    return torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(seed))


def part(tensor, group):
    return tensor.chunk(group.world_size)[group.rank]


def loss_of(output):
    return output.square().mean()


def backward(model, group, seed=100):
    """Runs forward and backward on this rank's part of a batch."""
    loss_of(model(part(batch(seed), group))).backward()


def gradients(module):
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in module.named_parameters()
    }


def single(module, inputs, steps=1):
    for _ in range(steps):
        loss_of(module(inputs)).backward()
    return gradients(module)


def assert_all_equal(ranks, expected):
    """Every rank has bit-identical gradients, which are the expected ones up to rounding."""
    for got in ranks:
        assert list(got) == list(expected)
        for name, value in expected.items():
            if value is None:
                assert got[name] is None, name
                continue
            assert got[name] is not None, name
            assert got[name].dtype == value.dtype
            torch.testing.assert_close(got[name], value)
            assert torch.equal(got[name], ranks[0][name]), f"{name} differs between ranks"
