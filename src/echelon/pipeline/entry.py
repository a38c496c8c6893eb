"""Where a gradient arrives when it leaves a stage."""

from __future__ import annotations

import torch

from echelon.pipeline.nested import Value, map_tensors


class _Enter(torch.autograd.Function):
    """Does nothing, but what it returns is no leaf: a layer may write to it in place."""

    @staticmethod
    def forward(_: object, tensor: torch.Tensor) -> torch.Tensor:
        # Not a view, which autograd would protect as it protects the leaf; what it saves is still watched.
        return tensor.detach()

    @staticmethod
    def backward(_: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def enter(value: Value) -> Value:
    """Returns the same value for a stage that may write to it; gradients arrive at the tensors of the given one."""
    return map_tensors(_enter, value)


def _enter(tensor: torch.Tensor) -> Value:
    return _Enter.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
