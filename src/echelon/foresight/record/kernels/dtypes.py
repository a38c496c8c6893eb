"""Types of tensors that an operator refuses when it computes, but not when it tells the shape of its result.

Fake tensors only tell shapes. torch checks these types in its kernels, as for a product of float32 and bfloat16.
Sources: ATen/native of torch 2.13, the files Blas, Convolution, layer_norm, group_norm, Normalization, Loss, LossNLL
and TensorAdvancedIndexing, and their counterparts for CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_ONE_DTYPE: Mapping[str, tuple[int, ...]] = {
    "mm": (0, 1),
    "mv": (0, 1),
    "addmm": (0, 1, 2),
    "addmv": (0, 1, 2),
    "_addmm_activation": (0, 1, 2),
    "convolution": (0, 1, 2),
    "binary_cross_entropy": (0, 1, 2),
    "nll_loss_forward": (0, 2),
    "nll_loss2d_forward": (0, 2),
    **dict.fromkeys(("index_add", "index_add_", "index_copy", "index_copy_"), (0, 3)),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), (0, 2)),
}
"""Positions of the arguments that must have one type. Each of them may be None or left out."""
_WEIGHTS: Mapping[str, int] = {
    "native_layer_norm": 2,
    "native_group_norm": 1,
    "native_batch_norm": 1,
    "_native_batch_norm_legit": 1,
}
"""Position of a norm's weight. A weight of float32 fits 16 bits: on the CPU always, on a GPU in batch norm alone."""
_MIXED_ON_GPU = frozenset({"native_batch_norm", "_native_batch_norm_legit"})
_TARGETS: Mapping[str, int] = {"nll_loss_forward": 1, "nll_loss2d_forward": 1}
"""Position of a loss's numbers of classes, which are int64 or uint8."""


def check_dtypes(name: str, args: Sequence[Any], on_host: bool) -> None:
    """Raises RuntimeError, as torch does, if an operator cannot compute with the types of its arguments.

    Args:
        name: name of the operator, without namespace and overload.
        args: its positional arguments.
        on_host: whether it computes on the CPU.
    """
    if (position := _TARGETS.get(name)) is not None and args[position].dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(
            f"{name}: expected a target of int64 or uint8, but got {_dtypes(args[position : position + 1])}: convert "
            "it, as by target.long()"
        )
    if (positions := _ONE_DTYPE.get(name)) is not None:
        given = [args[each] for each in positions if each < len(args) and isinstance(args[each], Tensor)]
        differ = any(each.dtype != given[0].dtype for each in given)
    elif (position := _WEIGHTS.get(name)) is not None and isinstance(args[position], Tensor):
        given = [args[0], args[position]]
        is_16_bits = given[0].dtype in (torch.float16, torch.bfloat16)
        is_mixed = is_16_bits and given[1].dtype == torch.float32 and (on_host or name in _MIXED_ON_GPU)
        differ = given[0].dtype != given[1].dtype and not is_mixed
    else:
        return
    if differ:
        raise RuntimeError(
            f"{name}: expected tensors of one dtype, but got {_dtypes(given)}: convert one of them, as by x.to(dtype), "
            "or compute under torch.autocast"
        )


def is_checked(name: str) -> bool:
    """Whether `check_dtypes` has something to check for an operator."""
    return name in _ONE_DTYPE or name in _WEIGHTS


def _dtypes(tensors: Sequence[Tensor]) -> str:
    return " and ".join(dict.fromkeys(str(each.dtype).removeprefix("torch.") for each in tensors))
