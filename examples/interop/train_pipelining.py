"""torch.distributed.pipelining over Echelon.  torchrun --nproc-per-node 2 examples/interop/train_pipelining.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import echelon.interop.torch_distributed  # noqa: F401 # makes "echelon" a backend of torch.distributed

dist.init_process_group("echelon")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
layers = [nn.Linear(8 if rank == 0 else 64, 64), nn.Tanh()]
if rank == num_ranks - 1:
    layers.append(nn.Linear(64, 1))
module = nn.Sequential(*layers)
schedule = Schedule1F1B(
    PipelineStage(module, rank, num_ranks, torch.device("cpu")), n_microbatches=4, loss_fn=nn.functional.mse_loss
)
optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(0)

for _ in range(100):
    inputs = torch.randn(64, 8, generator=generator)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=inputs.sum(dim=1, keepdim=True).sin(), losses=losses)
    optimizer.step()
    optimizer.zero_grad()

if rank == num_ranks - 1:
    print(f"loss {torch.stack(losses).mean():.3f} on {num_ranks} ranks over {dist.get_backend()}")
dist.destroy_process_group()
