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


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, noise, real=None):
        made = self.generator(noise)
        return self.discriminator(made) if real is None else self.discriminator(real - made.detach())


def adversarial_in_one(group, zeroed, num_discriminator_steps, first):
    """Each optimizer sets its gradients to zero before its own backward. That of the other one's may add to them."""
    ddp = echelon.DDP(Gan(), group)
    parts = {"generator": ddp.generator, "discriminator": ddp.discriminator}
    optimizers = {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in parts.items()}
    noise, real = torch.full((1, 2), group.rank + 1.0), torch.zeros(1, 4)  # equal batches are warned of, too

    def train(name, *inputs):
        if name in zeroed:
            optimizers[name].zero_grad()
        ddp(*inputs).mean().backward()
        optimizers[name].step()

    for step in range(4):
        if step or first == "generator":
            train("generator", noise)
        for _ in range(num_discriminator_steps):
            train("discriminator", noise, real)


@pytest.mark.parametrize("num_discriminator_steps", [1, 3])
@pytest.mark.parametrize("first", ["generator", "discriminator"])
def test_two_optimizers_of_one_module_are_fine(first, num_discriminator_steps):
    """The discriminator's backward does not reach the generator, whose gradients are there still."""
    with warnings.catch_warnings(action="error"):
        both = ("generator", "discriminator")
        echelon.simulate(adversarial_in_one, 2, (both, num_discriminator_steps, first))


@pytest.mark.parametrize("first", ["generator", "discriminator"])
def test_a_missing_zero_grad_of_the_first_of_two_optimizers_is_warned_of(first):
    with pytest.warns(UserWarning, match=WARNING) as caught:
        echelon.simulate(adversarial_in_one, 2, ((), 1, first))
    assert len(caught) == 1


def stepping_once(group):
    """The first optimizer's gradients stay for ever."""
    ddp, noise = echelon.DDP(Gan(), group), torch.full((1, 2), group.rank + 1.0)
    ddp(noise).mean().backward()
    torch.optim.SGD(ddp.generator.parameters(), 0.1).step()
    for _ in range(150):
        ddp(noise, torch.zeros(1, 4)).mean().backward()
    return ddp._sync.missing_zero_grad.is_done


def test_the_watch_ends_after_a_hundred_backwards():
    assert echelon.simulate(stepping_once, 2).results == [True, True]
