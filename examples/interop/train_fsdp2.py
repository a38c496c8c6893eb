"""torch's fully_shard (FSDP2) over Echelon.  torchrun --nproc-per-node 2 examples/interop/train_fsdp2.py"""

import torch
import torch.distributed as dist
from sine import report, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import echelon.interop.torch_distributed  # noqa: F401 # makes "echelon" a backend of torch.distributed

dist.init_process_group("echelon")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
for layer in model:
    fully_shard(layer, mesh=mesh)  # each rank keeps its part of every weight
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(dist.get_rank())

report(train(model, optimizer, generator))
dist.destroy_process_group()
