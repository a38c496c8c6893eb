"""Group normalisation of recorded ranks, which a GPU computes on contiguous images.

On the CPU it keeps channels last. On a GPU such images are copied first, the copy is kept for backward, and the result
has channels first. Source: ATen/native/group_norm.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from echelon._torch_private.tensors import by_formula, destroy_library, transform_stack
from echelon.foresight.record.here import recording_here

_GROUP_NORM = torch.ops.aten.group_norm.default


@contextmanager
def norms_as_on_gpu() -> Iterator[None]:
    """Inside, group normalisation of recorded ranks has the layout of a GPU."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        library.impl("group_norm", _group_norm, "AutogradCPU")
        yield
    finally:
        destroy_library(library)


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
