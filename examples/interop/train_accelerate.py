"""Hugging Face's Accelerate over Echelon.  torchrun --nproc-per-node 2 examples/interop/train_accelerate.py"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon.interop.torch_distributed  # noqa: F401 # makes "echelon" a backend of torch.distributed

dist.init_process_group("echelon")  # otherwise Accelerate takes Gloo
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
inputs = torch.randn(1024, 8)
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())
layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
model, optimizer, loader = accelerator.prepare(
    layers, torch.optim.Adam(layers.parameters(), lr=0.01), DataLoader(dataset, batch_size=32, shuffle=True)
)

for _ in range(6):
    for batch, targets in loader:
        loss = nn.functional.mse_loss(model(batch), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

mean_loss = accelerator.reduce(loss.detach(), "mean")
accelerator.print(f"loss {mean_loss:.3f} on {accelerator.num_processes} ranks over {dist.get_backend()}")
dist.destroy_process_group()
