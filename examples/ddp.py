"""Data parallelism: every rank has the whole model and its own data.  echelon run -n 2 examples/ddp.py"""

import torch
from torch import nn

import echelon

group = echelon.init()  # under `echelon run`, torchrun or echelon.simulate; run directly, world_size is 1
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
ddp = echelon.DistributedDataParallel(model, group)  # every rank now has rank 0's weights
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(group.rank)

for _ in range(200):
    inputs = torch.randn(32, 8, generator=generator)
    loss = nn.functional.mse_loss(ddp(inputs), inputs.sum(dim=1, keepdim=True).sin())
    loss.backward()  # every gradient is now the mean over all ranks
    optimizer.step()
    optimizer.zero_grad()

mean_loss = group.all_reduce(loss.detach(), op="mean")
if group.rank == 0:
    print(f"loss {mean_loss:.3f} on {group.world_size} ranks")
