"""Phases of operations, and the FLOPs of a model that follow from them."""

from collections import Counter

import pytest
import torch
from torch import nn

import echelon
from echelon.foresight.trace import Kernel

SIZE = 64
PRODUCT = 2 * SIZE**3


def products(program, *args):
    """Returns the products of a step by phase, and the FLOPs of its model, in products of square matrices."""
    seen = echelon.foresee(program, 1, args)
    found = Counter()
    for entry in seen.traces[0].entries:
        if isinstance(entry, Kernel) and entry.flops:
            found[entry.phase] += entry.flops / PRODUCT
    return found, seen.played.model_flops / PRODUCT


def layer():
    return nn.Linear(SIZE, SIZE, bias=False).cuda(), torch.ones(SIZE, SIZE, device="cuda")


# Optimizers


def trained(kind, by_closure):
    model, x = layer()
    optimizer = kind(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    for _ in range(2):
        if by_closure:
            optimizer.step(closure=closure)
        else:
            closure()
            optimizer.step()


def test_products_of_an_optimizer_are_not_those_of_the_model():
    """Muon multiplies matrices."""
    found, model = products(trained, torch.optim.Muon, False)
    assert found["optimizer"] > 1
    assert (found["forward"], found["backward"], model) == (1, 1, 2)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS, torch.optim.Muon])
def test_a_closure_of_an_optimizer_is_forward_and_backward(kind):
    found, model = products(trained, kind, True)
    assert found["forward"] == found["backward"] >= 1
    assert model == found["forward"] + found["backward"]


def test_gradients_that_a_closure_makes_have_their_kind():
    seen = echelon.foresee(trained, 1, (torch.optim.LBFGS, True))
    assert seen.memory[0].kinds_at_peak["gradients"] >= 4 * SIZE**2
