"""Forward and backward on a batch that is the same wherever it is made, and what gradients they left."""

import torch

BATCH = 12
"""Samples in the global batch: divides evenly over 1, 2, 3 and 4 ranks."""


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
