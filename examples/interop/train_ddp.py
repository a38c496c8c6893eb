"""torch's own DistributedDataParallel over Echelon.  torchrun --nproc-per-node 2 examples/interop/train_ddp.py"""

import torch
import torch.distributed as dist
from sine import report, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import echelon.interop.torch_distributed  # noqa: F401 # makes "echelon" a backend of torch.distributed

dist.init_process_group("echelon")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(dist.get_rank())

report(train(model, optimizer, generator))
dist.destroy_process_group()
