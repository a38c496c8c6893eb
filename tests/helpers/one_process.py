"""One process that runs the microbatches one after another: the reference for pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from tests.helpers.models import fill, gradients

WIDTH = 6


def make_model(num_layers: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Makes a chain of layers with the same weights wherever it is called."""
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Tanh()]
    return fill(nn.Sequential(*layers))


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
    *,
    is_mean: bool = True,
) -> torch.Tensor:
    """Runs one microbatch after another and returns the loss, of which each has its share of the samples.

    Losses that are sums over samples, not means, are added up.
    """
    inputs, target = batch
    losses = []
    for x, y in zip(inputs.tensor_split(num_microbatches), target.tensor_split(num_microbatches), strict=True):
        loss = loss_fn(model(x), y)
        scale = len(x) / len(inputs) if is_mean else 1.0
        (loss * scale).backward()
        losses.append(loss.detach() * scale)
    return torch.stack(losses).sum()


def loss_and_gradients(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], num_microbatches: int, **options: object
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Does the same and returns the gradients by name, too."""
    return train_alone(model, batch, num_microbatches, **options), gradients(model)


def gradients_of(results: Iterable[tuple]) -> dict[str, torch.Tensor]:
    """Returns the gradients of all stages in one, of results that have a stage's gradients in third place."""
    merged: dict[str, torch.Tensor] = {}
    for _, _, found, _ in results:
        assert not set(merged) & set(found), "a parameter is in two stages"
        merged |= found
    return merged
