"""Kernels of convolutions on a GPU: a matrix product for each result, and changes of layout beside it.

cuDNN computes them as products of matrices that it does not store, one of which has the inputs under each position of
the window. Its kernels for tensor cores want channels last, so that it converts images of another layout, see "Tensor
Transformations" in its documentation. torch.compile chooses channels last by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from echelon.foresight.trace import CHANNELS_LAST, Kind

Shape: TypeAlias = tuple[int, ...]
Result: TypeAlias = Literal["output", "input", "weight"]

_FEW_CHANNELS = 8
"""Channels of a group below which grouped convolutions are no matrix products, such as depthwise ones."""
_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Layouts that need no conversion, by the number of dimensions. Sequences have none."""


class Part(NamedTuple):
    """A kernel of a convolution."""

    name: str
    kind: Kind
    flops: int
    shape: Shape
    reads: Sequence[Tensor]
    writes: Tensor | None
    """None: a copy of the tensor that it reads."""


def shapes(x: Tensor, weight: Tensor, out: Tensor, is_transposed: bool, groups: int) -> Mapping[Result, Shape]:
    """Returns the products that give the output of a convolution, and the gradients of its input and weight.

    A product is (groups, rows, columns, terms of a sum), or () if a convolution is none.
    """
    if is_transposed:  # as the gradient of a convolution's input
        swapped = shapes(out, weight, x, False, groups)
        return {"output": swapped["input"], "input": swapped["output"], "weight": swapped["weight"]}
    outputs, inputs = weight.shape[0] // groups, weight.shape[1]
    if min(outputs, inputs) < _FEW_CHANNELS < groups:
        return {"output": (), "input": (), "weight": ()}
    # A window of inputs for each output, in as many dimensions as images have.
    window = math.prod(weight.shape[2:])
    pixels, pixels_in = (each.numel() // (groups * count) for each, count in ((out, outputs), (x, inputs)))
    return {
        "output": (groups, pixels, outputs, inputs * window),
        # With a stride, each input is a term of fewer outputs.
        "input": (groups, pixels_in, inputs, max(1, outputs * window * pixels // max(1, pixels_in))),
        "weight": (groups, outputs, inputs * window, pixels),
    }


def parts(name: str, args: Sequence[Any], out: Any, converts: bool) -> list[Part]:
    """Returns the kernels of the operator "convolution" or "convolution_backward".

    Args:
        name: the operator.
        args: its arguments.
        out: its results.
        converts: whether images with channels first are converted.
    """
    found: list[Part] = []
    products: list[tuple[Result, list[Tensor], Tensor | None]]
    if name == "convolution":
        x, weight, bias, *_, is_transposed, _, groups = args
        y = out
        products = [("output", [x, weight] if bias is None else [x, weight, bias], y)]
    else:
        y, x, weight, *_, is_transposed, _, groups, _ = args
        products = [("input", [y, weight], out[0]), ("weight", [y, x], out[1])]
    # Each of the three products has as many.
    flops = _flops_of_product(x, weight, y, is_transposed)
    of_results = shapes(x, weight, y, is_transposed, groups)
    for result, read, written in products:
        if written is None:
            continue
        shape = of_results[result]
        # Weights are small, so their conversion does not count.
        images = [each for each in (*read[:2], written) if each is not weight and each.shape != weight.shape]
        # torch has kernels of its own for depthwise ones, in any layout.
        if converts and (groups == 1 or weight.shape[1] > 1):
            found += [
                Part(CHANNELS_LAST, "other", 0, (), [each], None) for each in images if not _has_channels_last(each)
            ]
        found.append(Part(name, "matmul", flops, shape, read, written))
    # The gradient of the bias is a sum over all images and pixels.
    if name != "convolution" and out[2] is not None:
        found.append(Part(name, "other", 0, (), [y], out[2]))
    return found


def flops_of_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, *others: Any, out_val: Sequence[Tensor | None]
) -> int:
    """Returns the FLOPs of "convolution_backward". torch's formula counts the groups of a weight's gradient twice."""
    is_transposed = others[4]
    return _flops_of_product(x, weight, gradient, is_transposed) * sum(each is not None for each in out_val[:2])


def _flops_of_product(x: Tensor, weight: Tensor, out: Tensor, is_transposed: bool) -> int:
    return 2 * (x if is_transposed else out).numel() * weight[0].numel()


def _has_channels_last(images: Tensor) -> bool:
    """Whether a tensor is in the layout of images with channels last."""
    layout = _LAYOUTS.get(images.ndim)
    return layout is not None and images.is_contiguous(memory_format=layout)


def is_channels_last(images: Tensor) -> bool:
    """Whether a tensor has channels last alone. With a single channel, it has channels first as well."""
    return not images.is_contiguous() and _has_channels_last(images)
