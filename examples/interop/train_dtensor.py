"""Tensor parallelism by torch's DTensor over Echelon.  torchrun --nproc-per-node 2 examples/interop/train_dtensor.py"""

import torch
import torch.distributed as dist
from sine import report, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import echelon.interop.torch_distributed  # noqa: F401 # makes "echelon" a backend of torch.distributed

dist.init_process_group("echelon")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
model = parallelize_module(layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(0)  # all ranks see the same batch

report(train(model, optimizer, generator, samples=64))
dist.destroy_process_group()
