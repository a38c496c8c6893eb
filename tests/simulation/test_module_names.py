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
    model(x)  # modules have names from now on
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


def fewer_steps():
    model, rank = sharded()
    for _ in range(3 - rank):
        model(torch.ones(2, 4)).sum().backward()


def other_order():
    dist.init_process_group("gloo")
    wide, narrow = fully_shard(nn.Linear(4, 8)), fully_shard(nn.LayerNorm(4))
    for layer in (wide, narrow) if dist.get_rank() else (narrow, wide):
        layer(torch.ones(2, 4))


class Skipping(Model):
    """Layers of equal shapes in another order on rank 1: what is gathered would be of other layers."""

    def forward(self, x):
        for number in (0, 2, 1) if dist.get_rank() else (0, 1, 2):
            x = self.layers[number](x)
        return x


def equal_layers():
    dist.init_process_group("gloo")
    model = Skipping()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)(torch.ones(2, 4))


def other_shapes():
    dist.init_process_group("gloo")
    width = 4 + 4 * dist.get_rank()
    fully_shard(nn.Linear(width, 4))(torch.ones(2, width))


SAME_BATCHES = "give every rank the same number of batches, as by drop_last=True or a DistributedSampler"
FEWER = f"rank 1 ran fewer forwards or backwards than rank 0: {SAME_BATCHES}, and evaluate on every rank"


@pytest.mark.parametrize(
    ("main", "told"),
    [
        (forward_of_some, "return self.layers(x) (FSDP of module layers.1)"),
        (forward_of_some, FEWER),
        (backward_of_some, "(FSDP of module layers.2) on rank 0, but barrier"),
        (backward_of_some, FEWER.replace(": ", ", ")),
        (fewer_steps, f"which has returned: {FEWER}"),
        (other_order, f"run the same layers forward and backward in the same order on every rank, and {SAME_BATCHES}"),
        (equal_layers, "(FSDP of module layers.1) on rank 0, but all_gather of rows of float32[10], #2"),
        (equal_layers, "(FSDP of module layers.2) on rank 1: run the same layers forward and backward"),
        (other_shapes, "(FSDP of Linear) on rank 0: make the module with the same shapes and dtypes on every rank"),
    ],
)
def test_the_module_stands_beside_the_line(main, told):
    with pytest.raises(EchelonError) as raised:
        echelon.simulate(main, 2)
    assert told in str(raised.value)
