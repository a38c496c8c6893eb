"""Engines of torch.distributed (c10d backends): their availability, timeouts and reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from echelon.backends.operators import Operator
from echelon.backends.torch_distributed.engine_names import ENGINES
from echelon.errors import LaunchError

_TIMED = frozenset({"gloo", "nccl"})
"""Engines whose operations take a timeout."""


class _Need(NamedTuple):
    """Requirement of an engine: a check of this build of torch, and advice if it fails."""

    is_there: Callable[[], bool]
    advice: str


_OTHER_TORCH = "install a build of torch that has it, or use backend='gloo'"
_NEEDS: Mapping[str, _Need] = {
    "gloo": _Need(dist.is_gloo_available, "install a build of torch that has it"),
    "nccl": _Need(dist.is_nccl_available, _OTHER_TORCH),
    "mpi": _Need(dist.is_mpi_available, _OTHER_TORCH),
    "ucc": _Need(dist.is_ucc_available, _OTHER_TORCH),
}

_DTYPES = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8})
"""Dtypes that every engine can add up."""
_OPS: Mapping[str, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def check_available(name: str) -> None:
    """Raises LaunchError if an engine of the backend of that name is missing here."""
    missing = [engine for engine in ENGINES[name].values() if not _NEEDS[engine].is_there()]
    if missing:
        raise LaunchError(
            f"backend={name!r} needs {missing[0]}, which torch {torch.__version__} was built without: "
            f"{_NEEDS[missing[0]].advice}"
        )
    if "cuda" in ENGINES[name] and not torch.cuda.is_available():
        raise LaunchError(
            f"backend={name!r} moves CUDA tensors, but torch {torch.__version__} sees no GPU here: "
            "check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use backend='gloo'"
        )


def is_timed(name: str) -> bool:
    """Whether the operations of all engines of a backend take a timeout."""
    return _TIMED.issuperset(ENGINES[name].values())


def native_op(operator: Operator, dtype: torch.dtype) -> dist.ReduceOp.RedOpType | None:
    """Returns the engines' name of a reduction; None if not all of them can do it, or not as we promise.

    Their min and max of floats lose a NaN, or keep it, depending on the order of the ranks.
    """
    if dtype not in _DTYPES or (operator.name in ("min", "max") and dtype.is_floating_point):
        return None
    return _OPS.get(operator.name)
