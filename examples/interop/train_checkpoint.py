"""torch.distributed.checkpoint over Echelon: saves a sharded model, loads it into a new one, and trains on.

torchrun --nproc-per-node 2 examples/interop/train_checkpoint.py
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sine import train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import echelon.interop.torch_distributed  # noqa: F401 # makes "echelon" a backend of torch.distributed


def sharded_model():
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def mean_loss(loss):
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return loss.item()


def state_of(model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


dist.init_process_group("echelon")
folder = sys.argv[1] if len(sys.argv) > 1 else "checkpoint"
generator = torch.Generator().manual_seed(dist.get_rank())
torch.manual_seed(0)
model, optimizer = sharded_model()
train(model, optimizer, generator, steps=50)
dcp.save(state_of(model, optimizer), checkpoint_id=folder)  # every rank writes its part
here = generator.get_state()
undisturbed = mean_loss(train(model, optimizer, generator, steps=50))

model, optimizer = sharded_model()  # a new model with other weights
state = state_of(model, optimizer)
dcp.load(state, checkpoint_id=folder)
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
generator.set_state(here)
resumed = mean_loss(train(model, optimizer, generator, steps=50))

if dist.get_rank() == 0:
    print(f"loss {resumed:.3f} after a resume, {undisturbed:.3f} without, on {dist.get_world_size()} ranks")
dist.destroy_process_group()
