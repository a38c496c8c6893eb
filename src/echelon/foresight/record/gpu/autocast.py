"""Autocast of a GPU for recorded ranks, whose tensors are on the CPU for torch.

For each device torch lists the operators that autocast computes in float32, in 16 bits, or in the widest type of their
inputs. Operators that only the list of CUDA has are treated here as there. Source: ATen/autocast_mode.h of torch 2.13.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from echelon._torch_private.tensors import below_autocast, destroy_library, has_autocast, position_of
from echelon.backends.memory import tensors_in
from echelon.foresight.record.here import recording_here

_CUDA = "AutocastCUDA"
_CPU = "AutocastCPU"
_UPSAMPLED = tuple(
    f"{name}{suffix}"
    for name, suffixes in {
        "upsample_nearest": ("1d", "2d", "3d"),
        "_upsample_nearest_exact": ("1d", "2d", "3d"),
        "upsample_linear": ("1d",),
        "upsample_bilinear": ("2d",),
        "_upsample_bilinear2d": ("_aa",),
        "upsample_bicubic": ("2d",),
        "_upsample_bicubic2d": ("_aa",),
        "upsample_trilinear": ("3d",),
    }.items()
    for suffix in suffixes
)
_IN_FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "softplus"),
    *("layer_norm", "native_layer_norm", "group_norm", "rms_norm", "renorm", "norm.Scalar", "norm.ScalarOpt_dim"),
    *("frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim"),
    *("cosine_similarity", "dist", "pdist", "logsumexp"),
    *_UPSAMPLED,
)
"""Operators whose inputs are converted to float32."""
_TO_FLOAT32 = (
    *("softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
)
"""Operators that get the argument `dtype`, so that they read 16 bits and compute in float32."""
_IN_16_BITS = (
    *("addmv", "addr", "mv", "einsum", "chain_matmul", "linalg_multi_dot"),
    *("lstm_cell", "gru_cell", "rnn_relu_cell", "rnn_tanh_cell"),
)
_IN_WIDEST = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put", "tensordot", "scatter_add"),
)
_UNCHANGED = (
    *("avg_pool3d", "adaptive_avg_pool3d", "max_pool3d", "adaptive_max_pool3d"),
    *("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d"),
)
"""Operators that only the list of the CPU has, for float32."""


@contextmanager
def autocast_as_on_gpu() -> Iterator[None]:
    """Inside, autocast treats operators of recorded ranks as on a GPU."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for names, treatment in _TREATMENTS.items():
            for name in names:
                if has_autocast(name, _CUDA) and not has_autocast(name, _CPU):
                    library.impl(name, partial(_called, _operator(name), treatment), _CPU)
        with warnings.catch_warnings():
            # torch warns of kernels that are replaced.
            warnings.simplefilter("ignore")
            for name in _UNCHANGED:
                library.impl(name, partial(_called, _operator(name), _as_on_cpu), _CPU, allow_override=True)
        yield
    finally:
        destroy_library(library)


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


Treatment = Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""Function that converts the arguments of an operator."""


def _called(operator: Any, treatment: Treatment, *args: Any, **kwargs: Any) -> Any:
    # What the library replaces, and other threads get still, is `_as_on_cpu` or nothing.
    if (recording_here() is None) == (treatment is _as_on_cpu):
        args, kwargs = treatment(operator, args, kwargs)
    with below_autocast():
        return operator(*args, **kwargs)


def _in_float32(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return _converted(args, torch.float32), kwargs


def _to_float32(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    position = position_of(operator, "dtype")
    is_given = kwargs.get("dtype") is not None or (position < len(args) and args[position] is not None)
    if is_given or not _is_eligible(args[0]):
        return args, kwargs
    return args[:position], {**kwargs, "dtype": torch.float32}


def _in_16_bits(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return _converted(args, torch.get_autocast_dtype("cpu")), kwargs


def _in_widest(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    is_wide = any(each.dtype == torch.float32 for each in tensors_in(args))
    return _converted(args, torch.float32 if is_wide else torch.get_autocast_dtype("cpu")), kwargs


def _as_on_cpu(*given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Converts as torch does for threads that run no recorded rank."""
    return _in_float32(*given)


_TREATMENTS: dict[tuple[str, ...], Treatment] = {
    _IN_FLOAT32: _in_float32,
    _TO_FLOAT32: _to_float32,
    _IN_16_BITS: _in_16_bits,
    _IN_WIDEST: _in_widest,
}


def _converted(values: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(
        _converted(each, dtype) if isinstance(each, list | tuple) else each.to(dtype) if _is_eligible(each) else each
        for each in values
    )


def _is_eligible(value: object) -> bool:
    """Whether autocast converts a value: tensors of floating-point numbers, but not of float64."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
