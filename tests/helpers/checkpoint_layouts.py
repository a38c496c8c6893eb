"""One model in every layout that a checkpoint can have, trained for some steps, and its whole state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

import echelon
from echelon.pipeline import Pipeline
from tests.helpers.models import fill

WORDS, WIDTH, SAMPLES = 7, 4, 12
LAYERS = ("embed", "first", "tanh", "norm", "second", "drop", "third", "head")


def make_net(*, offset: float = 0.0) -> nn.Sequential:
    """Makes a model with a tied weight, running statistics, a frozen bias and dropout."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        embed=nn.Embedding(WORDS, WIDTH),
        first=nn.Linear(WIDTH, WIDTH),
        tanh=nn.Tanh(),
        norm=nn.BatchNorm1d(WIDTH),
        second=nn.Linear(WIDTH, WIDTH),
        drop=nn.Dropout(0.25),
        third=nn.Linear(WIDTH, WIDTH, bias=False),
        head=nn.Linear(WIDTH, WORDS, bias=False),
    )
    net = fill(nn.Sequential(layers))
    net.head.weight = net.embed.weight
    net.second.bias.requires_grad_(False)
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor += offset if tensor.is_floating_point() else int(offset)
    return net


class Run(NamedTuple):
    """A rank's part of a run."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    step: Callable[[int], object]
    """Trains one step, whose number it takes."""


class Layout(NamedTuple):
    """Layout of the model: replicas, stages, and whether the optimizer's state is cut."""

    dp: int = 1
    pp: int = 1
    schedule: str = ""
    num_chunks: int = 1
    at: tuple[str, ...] = ()
    zero: bool = False
    plain: bool = False

    @property
    def world_size(self) -> int:
        return self.dp * self.pp


LAYOUTS = {
    "single": Layout(plain=True),
    "plain 2": Layout(dp=2, plain=True),
    "dp 1": Layout(),
    "dp 2": Layout(dp=2),
    "dp 3": Layout(dp=3),
    "dp 4": Layout(dp=4),
    "zero 1": Layout(zero=True),
    "zero 2": Layout(dp=2, zero=True),
    "zero 3": Layout(dp=3, zero=True),
    "zero 4": Layout(dp=4, zero=True),
    "gpipe 2": Layout(pp=2, schedule="gpipe", at=("norm",)),
    "1f1b 3": Layout(pp=3, schedule="1f1b", at=("first", "head")),
    "1f1b 4": Layout(pp=4, schedule="1f1b", at=("first", "second", "head")),
    "interleaved 2": Layout(pp=2, schedule="interleaved-1f1b", num_chunks=2, at=("first", "norm", "third")),
    "zb-v 2": Layout(pp=2, schedule="zb-v", num_chunks=2, at=("tanh", "second", "head")),
    "dp 2 pp 2": Layout(dp=2, pp=2, schedule="1f1b", at=("second",)),
    "zero 2 pp 2": Layout(dp=2, pp=2, schedule="gpipe", at=("tanh",), zero=True),
}


def build(group: echelon.ProcessGroup, layout: Layout, *, offset: float = 0.0, steps: int = 20) -> Run:
    """Builds a rank's part of the model, with values that differ by `offset` from those of another run."""
    torch.manual_seed(0 if layout.plain else group.rank)  # replicas that nobody makes equal have to stay so
    net = make_net(offset=offset)
    if layout.pp > 1:
        return _pipeline(group, layout, net, steps)
    model = net if layout.plain else echelon.DDP(net, group)
    optimizer = _optimizer(model.named_parameters(), layout, group)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def step(number: int) -> object:
        inputs, target = batch(number)
        inputs, target = (part.tensor_split(layout.dp)[0 if layout.plain else group.rank] for part in (inputs, target))
        loss = nn.functional.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    return Run(model, optimizer, scheduler, step)


def _pipeline(group: echelon.ProcessGroup, layout: Layout, net: nn.Sequential, steps: int) -> Run:
    mesh = echelon.Mesh(group, dp=layout.dp, pp=layout.pp)
    pipe = Pipeline(
        net,
        mesh["pp"],
        layout.schedule,
        4 // layout.dp,
        nn.functional.cross_entropy,
        num_chunks=layout.num_chunks,
        at=list(layout.at),
        data_parallel=mesh["dp"] if layout.dp > 1 else None,
    )
    optimizer = _optimizer(pipe.named_parameters(), layout, mesh["dp"])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def step(number: int) -> object:
        share = [part.tensor_split(layout.dp)[mesh.coordinates["dp"]] for part in batch(number)]
        loss = pipe.step(share[0], target=share[1]).loss
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    return Run(pipe, optimizer, scheduler, step)


def _optimizer(
    named: Iterator[tuple[str, nn.Parameter]], layout: Layout, group: echelon.ProcessGroup
) -> torch.optim.Optimizer:
    decays: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for _, parameter in named:
        (decays if parameter.dim() > 1 else others).append(parameter)
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "betas": (0.8, 0.9)}]
    if layout.zero:
        return echelon.ZeroOptimizer(torch.optim.AdamW, groups, group, lr=0.01)
    return torch.optim.AdamW(groups, lr=0.01)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the inputs and targets of a step."""
    generator = torch.Generator().manual_seed(number)
    inputs, target = torch.randint(WORDS, (2, SAMPLES), generator=generator)
    return inputs, target


def whole_state(run: Run) -> dict[str, torch.Tensor]:
    """Returns this rank's part of the state by name, by the objects' own state dicts."""
    found = {name: value.clone() for name, value in run.model.state_dict().items()}
    names = {id(one): name for name, one in run.model.named_parameters()}
    ordered = [names[id(one)] for group in run.optimizer.param_groups for one in group["params"]]
    for number, state in run.optimizer.state_dict()["state"].items():
        name = ordered[number].replace("head.weight", "embed.weight")
        found |= {f"{name}.{key}": torch.as_tensor(value).clone() for key, value in state.items()}
    for group in run.optimizer.param_groups:
        for one in group["params"]:
            found[f"lr of {names[id(one)].replace('head', 'embed')}"] = torch.tensor([group["lr"], *group["betas"]])
    return found


def united(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns the state of the whole model. Of tensors on several ranks the first counts."""
    whole: dict[str, torch.Tensor] = {}
    for part in parts:
        whole = part | whole
    return whole


def trained_and_saved(group: echelon.ProcessGroup, name: str, path: str, steps: int = 2) -> dict[str, torch.Tensor]:
    """Trains and saves; returns the state."""
    run = build(group, LAYOUTS[name])
    for number in range(steps):
        run.step(number)
    store = echelon.checkpoint.Store(path)
    store.save(steps, model=run.model, optimizer=run.optimizer, scheduler=run.scheduler)
    store.close()
    return whole_state(run)


def loaded(group: echelon.ProcessGroup, name: str, path: str) -> dict[str, torch.Tensor]:
    """Loads into other values; returns the state."""
    run = build(group, LAYOUTS[name], offset=1.0)
    step = echelon.checkpoint.Store(path).load(model=run.model, optimizer=run.optimizer, scheduler=run.scheduler)
    assert step == 2
    assert run.scheduler.last_epoch == 2
    return whole_state(run)
