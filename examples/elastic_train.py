"""Training that survives the death of a rank: torchrun restarts all ranks, and they go on from the last checkpoint.

torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic_train.py --checkpoint runs/elastic

The result equals that of an undisturbed run, bit for bit: a checkpoint has everything that the next step depends on,
each rank's random numbers too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import echelon


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("elastic_train"), help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps from one checkpoint to the next")
    options = parser.parse_args(arguments)
    if options.every < 1:
        parser.error("give --every 1 or more")

    group = echelon.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    ddp = echelon.DistributedDataParallel(model, group)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    torch.manual_seed(group.rank)  # each rank draws its own data and dropout from here on

    store = echelon.checkpoint.Store(options.checkpoint, keep=2)
    first = store.load(model=ddp, optimizer=optimizer) or 0
    if first and group.rank == 0:
        print(f"going on after step {first}", flush=True)
    for step in range(first + 1, options.steps + 1):
        loss = train_step(ddp, optimizer)
        if step % options.every == 0 or step == options.steps:
            mean = group.all_reduce(loss, op="mean").item()
            store.save(step, model=ddp, optimizer=optimizer)
            if group.rank == 0:
                print(f"step {step}, loss {mean!r}", flush=True)
    store.close()


def train_step(ddp: echelon.DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Tensor:
    """Trains one step on data drawn by this rank. Returns this rank's loss."""
    inputs = torch.randn(32, 8)
    loss = nn.functional.mse_loss(ddp(inputs), inputs.sum(dim=1, keepdim=True).sin())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


if __name__ == "__main__":
    main()
