"""Training that survives the death of a rank: torchrun restarts all ranks, and they go on from the last checkpoint.

torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic_train.py --checkpoint train.safetensors

The result equals that of an undisturbed run, bit for bit. All randomness of a step follows from its number and the
rank. A checkpoint has everything that the next step depends on. Needs the package safetensors.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

import echelon


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("elastic_train.safetensors"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps from one checkpoint to the next")
    options = parser.parse_args(arguments)

    group = echelon.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    ddp = echelon.DistributedDataParallel(model, group)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)

    first = load(options.checkpoint, model, optimizer, group)
    if first and group.rank == 0:
        print(f"going on after step {first}", flush=True)
    for step in range(first + 1, options.steps + 1):
        loss = train_step(ddp, optimizer, step, group)
        if step % options.every == 0 or step == options.steps:
            mean = group.all_reduce(loss, op="mean").item()
            if group.rank == 0:
                write_atomically(options.checkpoint, save(dict(state(model, optimizer)), {"step": str(step)}))
                print(f"step {step}, loss {mean!r}", flush=True)


def train_step(
    ddp: echelon.DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int, group: echelon.ProcessGroup
) -> Tensor:
    """Trains one step on data that follows from `step` and the rank. Returns this rank's loss."""
    torch.manual_seed(
        step * group.world_size + group.rank
    )  # seeds the data and dropout, so a repeated step is the same
    inputs = torch.randn(32, 8)
    loss = nn.functional.mse_loss(ddp(inputs), inputs.sum(dim=1, keepdim=True).sin())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yields all tensors that the next step depends on, with stable names."""
    yield from model.state_dict().items()
    for number, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            yield f"optimizer.{number}.{name}", torch.as_tensor(value)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: echelon.ProcessGroup) -> int:
    """Restores the checkpoint on all ranks and returns its step. 0 if there is none.

    Every rank reads the file, so it must lie where all hosts see it.

    Raises:
        RuntimeError: the ranks have read different checkpoints.
    """
    step = 0
    if path.exists():
        with safe_open(path, framework="pt") as file:
            step = int(file.metadata()["step"])
            weights, values, names = {}, {}, file.keys()
            for name in names:
                prefix, _, rest = name.partition(".")
                if prefix == "optimizer":
                    number, _, key = rest.partition(".")
                    values.setdefault(int(number), {})[key] = file.get_tensor(name)
                else:
                    weights[name] = file.get_tensor(name)
        model.load_state_dict(weights)
        optimizer.load_state_dict(optimizer.state_dict() | {"state": values})
    steps = group.all_gather_object(step)
    if steps != [step] * group.world_size:
        raise RuntimeError(
            f"the ranks have checkpoints of the steps {steps}: put {path} into a folder that all of them see"
        )
    return step


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file as a whole. A reader sees the old or the new one, even after a crash."""
    draft = path.with_name(f".{path.name}.draft")
    with open(draft, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # the data must be on disk before the name points to it
    os.replace(draft, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # flushes the new name
    finally:
        os.close(folder)


if __name__ == "__main__":
    main()
