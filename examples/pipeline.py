"""Pipeline parallelism: every rank has a part of the model.  echelon run -n 2 examples/pipeline.py"""

import torch
from torch import nn

import echelon
from echelon.pipeline import Pipeline

group = echelon.init()
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)])
pipe = Pipeline(model, group, schedule="1f1b", num_microbatches=8, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.Adam(pipe.parameters(), lr=0.003)  # this rank's stage only
generator = torch.Generator().manual_seed(0)

for _ in range(50):
    inputs = torch.rand(512, 256, generator=generator)  # the first stage uses the inputs, the last one the target
    loss = pipe.step(inputs, target=inputs.flip(1)).loss  # does loss.backward(), for the whole batch
    optimizer.step()
    optimizer.zero_grad()

if group.rank == 0:
    planned, measured = pipe.schedule.simulate(), pipe.timeline
    print(f"loss {loss:.3f}, bubble {planned.bubble_rate:.0%} as planned, {measured.bubble_rate:.0%} as measured")
