"""Operators of recorded ranks by the kernels of a GPU: RMSNorm, dropout and group normalisation.

On the CPU, torch computes RMSNorm by its formula, in ten kernels and with tensors in float32, and dropout by a mask of
the input's dtype, in three. On a GPU the mask has one byte for each element. Sources: ATen/native/layer_norm.cpp since
torch 2.9, and ATen/native/Dropout.cpp.

Group normalisation keeps channels last on the CPU. On a GPU such images are copied first, the copy is kept for
backward, and the result has channels first. Source: ATen/native/group_norm.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from echelon._torch_private.tensors import below_autograd, by_formula, destroy_library, transform_stack
from echelon.foresight.record.here import recording_here
from echelon.foresight.record.kernels.convolutions import is_channels_last

_KEY = "AutogradCPU"
_RMS_NORM = torch.ops.aten.rms_norm.default
_DROPOUT = torch.ops.aten.dropout.default
_GROUP_NORM = torch.ops.aten.group_norm.default


@contextmanager
def fused_as_on_gpu() -> Iterator[None]:
    """Inside, recorded ranks run the operators of a GPU."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        library.impl("rms_norm", _rms_norm, _KEY)
        library.impl("dropout", _dropout, _KEY)
        library.impl("group_norm", _group_norm, _KEY)
        yield
    finally:
        destroy_library(library)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Computes RMSNorm as torch does on a GPU: by the formula if weight and input differ in dtype."""
    given = (x, shape, weight, eps)
    is_fused = recording_here() is not None and transform_stack() is None and _has_kernel(x, shape, weight)
    result: Tensor = _RMSNorm.apply(*given) if is_fused else by_formula(_RMS_NORM, *given)  # type: ignore[no-untyped-call]
    return result


def _has_kernel(x: Tensor, shape: Sequence[int], weight: Tensor | None) -> bool:
    # Shapes that do not fit have none, so that torch refuses them.
    fits = 0 < len(shape) <= x.dim() and list(x.shape[-len(shape) :]) == list(shape)
    if weight is not None:
        fits = fits and weight.dtype == x.dtype and list(weight.shape) == list(shape)
    return fits and x.is_floating_point() and not is_channels_last(x)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that keeps its input, the weight, and one number of float32 for each row."""

    @staticmethod
    def forward(context: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Tensor:
        rows = x.contiguous()  # a kernel of its own, which it is not below autograd
        with below_autograd():
            results: tuple[Tensor, Tensor] = torch.ops.aten._fused_rms_norm(rows, shape, weight, eps)
        context.save_for_backward(x, weight, results[1])
        context.shape, context.eps = shape, eps
        return results[0]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight, scale = context.saved_tensors
        needed = [context.needs_input_grad[0], context.needs_input_grad[2]]
        if torch.is_grad_enabled():  # for gradients of gradients torch, too, takes the formula
            result = by_formula(_RMS_NORM, x, context.shape, weight, context.eps)
            inputs = [each for each, is_needed in zip((x, weight), needed, strict=True) if is_needed]
            found = iter(torch.autograd.grad(result, inputs, gradient, create_graph=True))
            of_x, of_weight = (next(found) if is_needed else None for is_needed in needed)
        else:
            given = (gradient.contiguous(), x.contiguous(), context.shape, scale, weight, needed)
            with below_autograd():
                of_x, of_weight = torch.ops.aten._fused_rms_norm_backward(*given)
        return of_x, None, of_weight, None


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if recording_here() is not None and train and 0 < p < 1 and x.numel():
        return torch.native_dropout(x, p, train)[0]
    result: Tensor = by_formula(_DROPOUT, x, p, train)
    return result


def _group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    # In a transform of torch.func the input is a wrapper, whose layout says nothing.
    images = x.contiguous() if recording_here() is not None and transform_stack() is None else x
    result: Tensor = by_formula(_GROUP_NORM, images, num_groups, weight, bias, eps, cudnn_enabled)
    return result
