"""One process that runs the microbatches one after another: what a pipeline must give, too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

WIDTH = 6


def make_model(num_layers: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Makes a chain of layers with the same weights wherever it is called."""
    generator = torch.Generator().manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layer = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        fill(layer, generator)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers)


def fill(module: nn.Module, generator: torch.Generator) -> None:
    """Gives a module's parameters numbers from a generator."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) / 3)


def make_batch(num_samples: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes inputs and target, the same wherever it is called."""
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(num_samples, WIDTH, generator=generator, dtype=dtype) for _ in range(2)]
    return draw[0], draw[1]


def train_alone(
    model: nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor],
    num_microbatches: int,
    loss_fn: Callable[..., torch.Tensor] = nn.functional.mse_loss,
) -> torch.Tensor:
    """Runs one microbatch after another, each loss weighted by its share of the samples; returns the loss."""
    inputs, target = batch
    losses = []
    for x, y in zip(inputs.tensor_split(num_microbatches), target.tensor_split(num_microbatches), strict=True):
        loss = loss_fn(model(x), y)
        scale = len(x) / len(inputs)
        (loss * scale).backward()
        losses.append(loss.detach() * scale)
    return torch.stack(losses).sum()


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns the gradients of a module by name."""
    return {name: parameter.grad for name, parameter in module.named_parameters()}
