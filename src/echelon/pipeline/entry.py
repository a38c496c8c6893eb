"""Where a value enters a stage, and its gradient leaves it."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from echelon.pipeline.junctions import Gradient, edge_of
from echelon.pipeline.nested import Value, map_tensors, tensors_of


class _Entry(torch.autograd.Function):
    """Does nothing, but what it returns is no leaf: a layer may write to it in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.gradient = None
        # Not a view, which autograd would protect as it protects the leaf; what was saved of it is still watched.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        ctx.gradient = gradient


def enter(value: Value) -> Value:
    """Returns the same value for a stage, which may write to it."""
    return map_tensors(_enter, value)


def entries(value: Value) -> list[GradientEdge]:
    """Returns the places where the gradients of a value leave a stage, of those tensors that require one.

    Args:
        value: what `enter` returned, before the stage did anything to it.
    """
    return [edge_of(tensor) for tensor in tensors_of(value) if tensor.requires_grad]


def gradient_at(entry: GradientEdge) -> Gradient:
    """Returns what a backward brought to an entry; None if nothing depended on the tensor."""
    node: Any = entry.node
    gradient: Gradient = node.gradient
    return gradient


def copied(value: Value) -> Value:
    """Returns a copy, for a stage that will be run again with the value as it is now."""
    return map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), value)


def _enter(tensor: torch.Tensor) -> Value:
    return _Entry.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
