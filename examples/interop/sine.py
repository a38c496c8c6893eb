"""Task of the scripts in this folder: the sine of the sum of eight numbers."""

import torch
import torch.distributed as dist
from torch import nn


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator, steps: int = 100, samples: int = 32
) -> torch.Tensor:
    """Trains on batches from a generator, in an ordinary loop without ranks. Returns the last loss."""
    for _ in range(steps):
        inputs = torch.randn(samples, 8, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True).sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def report(loss: torch.Tensor) -> None:
    """Prints the mean loss of all ranks, once."""
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"loss {loss:.3f} on {dist.get_world_size()} ranks over {dist.get_backend()}")
