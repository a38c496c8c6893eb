"""Small models that are the same wherever they are made: simulated ranks share torch's random state."""

import torch
from torch import nn

TINY_MB = 1e-4
"""About 100 bytes: nearly every layer of the small models gets a bucket of its own, and some are larger."""


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
