"""The parts that all programs share: how one begins and ends, its model, its data and its result."""

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 16


class Result(NamedTuple):
    """Result of a program on one rank, as plain values."""

    own: Any
    """This rank's losses, and digests of its parameters."""
    everywhere: Any = None
    """Values that must be equal on all ranks."""


def program(function: Callable[[int, int], Result]) -> Callable[[], Result]:
    """Makes a program without arguments of a function of rank and world size."""

    @functools.wraps(function)
    def main() -> Result:
        rank, world_size = begin()
        try:
            return function(rank, world_size)
        finally:
            dist.destroy_process_group()

    del main.__wrapped__  # its signature is that of a program
    return main


def begin() -> tuple[int, int]:
    """Makes the default group, as torchrun's variables say. Returns rank and world size."""
    backend = os.environ.get("TEST_BACKEND", "gloo")
    if backend == "echelon":
        import echelon.interop.torch_distributed  # noqa: F401 # registers it

    dist.init_process_group(backend)
    torch.manual_seed(0)
    return dist.get_rank(), dist.get_world_size()


def digest(values: Iterable[Any]) -> str:
    """Returns a digest of the bits of tensors; of a DTensor its local part counts."""
    total = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            value = value.to_local() if hasattr(value, "to_local") else value
            total.update(f"{value.dtype} {tuple(value.shape)}".encode())
            # A copy: a tensor that shares its memory with NumPy cannot be freed, as FSDP1 does.
            total.update(value.detach().clone().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        else:
            total.update(repr(value).encode())
    return total.hexdigest()[:16]


def state_digest(optimizer: torch.optim.Optimizer) -> str:
    """Returns a digest of the moments of an optimizer."""
    return digest(value for state in optimizer.state.values() for value in state.values())


def mlp(width: int = WIDTH, depth: int = 3) -> nn.Sequential:
    """Returns a small model of `depth` layers, whose weights follow from the present seed."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


def batches(rank: int, steps: int, width: int = WIDTH, samples: int = 4) -> list[torch.Tensor]:
    """Returns the inputs of a rank."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(samples, width, generator=generator) for _ in range(steps)]


def train(
    model: nn.Module,
    rank: int,
    steps: int = 3,
    optimizer: torch.optim.Optimizer | None = None,
    before_step: Callable[[], object] | None = None,
    width: int = WIDTH,
) -> tuple[list[float], torch.optim.Optimizer]:
    """Trains a model. Returns its losses on this rank, and the optimizer."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for inputs in batches(rank, steps, width):
        loss = model(inputs).float().square().mean()
        loss.backward()
        if before_step is not None:
            before_step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """Gives all ranks a folder that rank 0 has made."""
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    try:
        yield where[0]
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(where[0])
