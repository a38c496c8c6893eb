"""Errors of collectives that FSDP2 begins name the module whose parameters it gathers or reduces."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import echelon
from echelon.errors import EchelonError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    def forward(self, x):
        return self.layers(x)


def sharded():
    dist.init_process_group("gloo")
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model), dist.get_rank()


def forward_of_some():
    model, rank = sharded()
    x = torch.ones(2, 4)
    if rank == 0:
        model(x)
    else:
        model.layers[0](x)


def backward_of_some():
    model, rank = sharded()
    loss = model(torch.ones(2, 4)).sum()
    if rank == 0:
        loss.backward()
    else:
        dist.barrier()


@pytest.mark.parametrize(
    ("main", "told"),
    [
        (forward_of_some, "return self.layers(x) (FSDP of module layers.1)"),
        (backward_of_some, "(FSDP of module layers.2) on rank 0, but barrier"),
    ],
)
def test_the_module_stands_beside_the_line(main, told):
    with pytest.raises(EchelonError) as raised:
        echelon.simulate(main, 2)
    assert told in str(raised.value)
