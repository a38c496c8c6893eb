"""Optimizer made before the wrapper: the same bits as one made after it, with every option."""

import contextlib

import pytest
import torch
from torch import nn

import echelon
from echelon import DDP
from echelon.data_parallel import AccumulateIn, CompressTo, LocalSGD, PowerSGD
from tests.helpers.grids import covering
from tests.helpers.models import TINY_MB, batch, fill, loss_of, mlp, part

OPTIONS = {
    "default": {},
    "small buckets": {"bucket_mb": TINY_MB},
    "average": {"buffers": "average"},
    "local": {"buffers": "local"},
    "samples": {"average": "samples"},
    "CompressTo": {"hook": (CompressTo, torch.bfloat16)},
    "AccumulateIn": {"hook": (AccumulateIn, torch.float32)},
    "PowerSGD": {"hook": (PowerSGD, 1)},
    "LocalSGD": {"hook": (LocalSGD, 2)},
    "no_sync": {},
    "join": {},
    "frozen first": {},
}
OPTIMIZERS = {
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),  # it has state before its first step
    "AdamW": (torch.optim.AdamW, {"lr": 0.05}),
    "foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "Zero": (echelon.ZeroOptimizer, {"optimizer_class": torch.optim.AdamW, "lr": 0.05}),
}


def make_optimizer(group, name, parameters):
    kind, options = OPTIMIZERS[name]
    if kind is not echelon.ZeroOptimizer:
        return kind(parameters, **options)
    return kind(params=parameters, group=group, **options)


def train(group, is_before, option, optimizer_name):
    """Returns the parameters after some steps. Ranks begin with different values, of which those of rank 0 count."""
    model = nn.Sequential(mlp(seed=group.rank), fill(nn.BatchNorm1d(3), group.rank))
    if option == "frozen first":
        model[0][0].weight.requires_grad_(False)
    options = {name: value[0](*value[1:]) if name == "hook" else value for name, value in OPTIONS[option].items()}
    if is_before:
        optimizer = make_optimizer(group, optimizer_name, model.parameters())
    ddp = DDP(model, group, **options)
    if not is_before:
        optimizer = make_optimizer(group, optimizer_name, ddp.parameters())
    num_batches = 4 - (option == "join" and group.rank == 1)
    with ddp.join(optimizer.step) if option == "join" else contextlib.nullcontext():
        for step in range(num_batches):
            optimizer.zero_grad()
            if option == "no_sync":
                with ddp.no_sync():
                    loss_of(ddp(part(batch(10 + step), group))).backward()
            loss_of(ddp(part(batch(step), group))).backward()
            optimizer.step()
            model[0][0].weight.requires_grad_(True)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(("option", "optimizer"), covering(OPTIONS, OPTIMIZERS))
def test_it_trains_as_one_made_after(option, optimizer):
    if (option, optimizer) == ("LocalSGD", "Zero"):
        pytest.skip("ZeroOptimizer needs equal gradients on all ranks")
    before, after = (echelon.simulate(train, 2, (is_before, option, optimizer)).results for is_before in (True, False))
    for one, other in zip(before, after, strict=True):
        assert all(map(torch.equal, one, other))
    if option != "LocalSGD":  # its ranks differ until the next average
        assert all(map(torch.equal, *before))


@pytest.mark.parametrize("optimizer", ["AdamW", "Zero"])
def test_it_trains_as_one_made_after_in_processes(pool, optimizer):
    before, after = (pool.run(train, 2, is_before, "small buckets", optimizer) for is_before in (True, False))
    for one, other in zip(before, after, strict=True):
        assert all(map(torch.equal, one, other))
