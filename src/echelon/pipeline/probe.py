"""Finds out whether the backward of a stage can be done in two halves, by doing it once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from echelon.pipeline.autocast import outside_autocast
from echelon.pipeline.deferred import SplitBackward
from echelon.pipeline.entry import entries
from echelon.pipeline.junctions import CannotSplit, Group, Root, edge_of
from echelon.pipeline.nested import Value, map_tensors
from echelon.pipeline.repeated import RepeatedWork
from echelon.pipeline.same_buffers import same_buffers
from echelon.pipeline.saved import SavedTensors, num_bytes
from echelon.pipeline.separate_uses import SeparateUses
from echelon.pipeline.stage import Forward, Halves, Stage


class Finding(NamedTuple):
    """What came of it."""

    output: Value
    """What the stage returned; its tensors that require a gradient are leaves."""
    halves: Halves | None
    """How the halves are done; None if they cannot."""
    reason: str = ""
    """Why not, with the name of the module."""


def probe(stage: Stage, forward: Forward) -> Finding:
    """Runs forward and both halves of the backward of one microbatch, and leaves no trace of it.

    Gradients, buffers and the state of the random numbers are as before; hooks of the user see one run more.
    """
    with _without_trace(stage.module), torch.enable_grad():
        output = map_tensors(_leaf, forward.on_copies().entered().run().output)
        try:
            return Finding(output, _try(stage, forward, ()))
        except CannotSplit as error:
            reused = _parameters_of(error.weights)
        try:
            return Finding(output, _try(stage, forward, reused))
        except CannotSplit as error:
            return Finding(output, None, f"{_owners(stage, error.weights)} {error.reason}")


def _try(stage: Stage, forward: Forward, reused: tuple[nn.Parameter, ...]) -> Halves:
    """Does both halves.

    Raises:
        CannotSplit: something had to be done twice, or refused to be.
    """
    saved, watch = SavedTensors(), RepeatedWork()
    forward = forward.on_copies().entered()
    ends = entries(forward.value) if stage.index > 0 else []
    with saved.saving(), SeparateUses(reused):
        roots = forward.run().roots
    split = SplitBackward([Root(edge_of(tensor), torch.ones_like(tensor)) for tensor in roots], ends)
    _refuse_custom_formulas(split.groups)
    del roots
    before = num_bytes(saved.tensors())
    try:
        with outside_autocast(), watch, saved.dropping():
            split.run_input(saved)
        frees = num_bytes(saved.tensors()) < before
        watch.next_part()
        with outside_autocast(), watch:
            split.run_weights(lambda group: setattr(watch, "label", group), into_leaves=False)
    except RuntimeError as error:
        weights = watch.label.leaves if isinstance(watch.label, Group) else ()
        raise CannotSplit(f"refuses it ({str(error).splitlines()[0]})", weights) from error
    if watch.found:
        name, group = watch.found[0]
        assert isinstance(group, Group)
        raise CannotSplit(f"does the same work for both ({name})", group.leaves)
    return Halves(reused, frees)


def _refuse_custom_formulas(groups: Sequence[Group]) -> None:
    """A formula in Python cannot know which of its gradients are wanted now, and would compute all of them twice."""
    for group in groups:
        for node, _ in group.junctions:
            if isinstance(node, BackwardCFunction):
                raise CannotSplit(f"has a formula of its own for all its gradients ({node.name()})", group.leaves)


def _parameters_of(weights: Sequence[Node]) -> tuple[nn.Parameter, ...]:
    found = (getattr(node, "variable", None) for node in weights)
    return tuple(parameter for parameter in found if isinstance(parameter, nn.Parameter))


def _owners(stage: Stage, weights: Sequence[Node]) -> str:
    """Names the modules that hold some weights."""
    ids = set(map(id, _parameters_of(weights)))
    names = [
        f"{stage.prefix}{name}".rstrip(".") + f" ({type(module).__name__})"
        for name, module in stage.module.named_modules()
        if any(id(parameter) in ids for parameter in module.parameters(recurse=False))
    ]
    return " and ".join(names) or f"a module of its {type(stage.module).__name__}"


@contextmanager
def _without_trace(module: nn.Module) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), same_buffers(module):
        yield


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
