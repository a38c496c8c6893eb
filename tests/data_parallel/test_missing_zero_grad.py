"""Gradients that are never set to zero are warned of, once; accumulation and adversarial training are not."""

import warnings

import pytest
import torch
from torch import nn

import echelon
from echelon.pipeline import Pipeline

WARNING = r"were added to the new ones: call optimizer\.zero_grad\(\) after each optimizer\.step\(\)"


def backwards(group, kind):
    """Returns a function that adds to the gradients, and the parameters."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(2)])
    if kind == "pipeline":
        pipe = Pipeline(model, group, "1f1b", 2, nn.functional.mse_loss)
        return lambda: pipe.step(torch.ones(4, 2), target=torch.zeros(4, 2)), list(pipe.parameters())
    ddp = echelon.DDP(model, group)
    return lambda: ddp(torch.ones(1, 2)).sum().backward(), list(ddp.parameters())


def forgetful(group, kind):
    backward, parameters = backwards(group, kind)
    optimizer = torch.optim.SGD(parameters, 0.1)
    for _ in range(5):
        backward()
        optimizer.step()


def accumulating(group, kind, set_to_none):
    backward, parameters = backwards(group, kind)
    optimizer = torch.optim.SGD(parameters, 0.1)
    for _ in range(4):
        backward()
        backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none)


@pytest.mark.parametrize("kind", ["ddp", "pipeline"])
def test_a_missing_zero_grad_is_warned_of_once(kind):
    with pytest.warns(UserWarning, match=WARNING) as caught:
        echelon.simulate(forgetful, 2, (kind,))
    assert len(caught) == 1


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kind", ["ddp", "pipeline"])
def test_accumulation_is_fine(kind, set_to_none):
    with warnings.catch_warnings(action="error"):
        echelon.simulate(accumulating, 2, (kind, set_to_none))


def adversarial(group):
    """The generator's backward adds to the discriminator's gradients, which are set to zero before its own."""
    generator, discriminator = (echelon.DDP(nn.Linear(2, 2), group) for _ in range(2))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (generator, discriminator)]
    for _ in range(3):
        optimizers[1].zero_grad()
        discriminator(torch.ones(1, 2)).sum().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        discriminator(generator(torch.ones(1, 2))).sum().backward()
        optimizers[0].step()


def test_adversarial_training_is_fine():
    with warnings.catch_warnings(action="error"):
        echelon.simulate(adversarial, 2)
