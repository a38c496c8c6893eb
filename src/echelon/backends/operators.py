"""The reductions: what they are called, what they do, and which dtypes they make sense for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from echelon.errors import UnsupportedOp

Combine = Callable[[torch.Tensor, torch.Tensor], object]
"""Combines the second tensor into the first, in place."""


class Function(Protocol):
    """What torch's functions of two tensors have in common."""

    def __call__(self, input: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Operator:
    """A reduction. `mean` is a sum that is divided by the number of ranks at the end."""

    name: str
    function: Function
    accepts: Callable[[torch.dtype], bool]
    divides: bool = False

    def combine(self, own: torch.Tensor, other: torch.Tensor) -> None:
        """Combines the second tensor into the first, in place."""
        self.function(own, other, out=own)

    def finish(self, total: torch.Tensor, num_ranks: int) -> torch.Tensor:
        """Makes the result of what all ranks were combined to, in place."""
        return total.div_(num_ranks) if self.divides else total


def _is_number(dtype: torch.dtype) -> bool:
    return dtype not in (torch.bool, torch.uint64)  # torch neither adds nor compares uint64


def _is_ordered(dtype: torch.dtype) -> bool:
    return not dtype.is_complex and dtype != torch.uint64


def _is_continuous(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _is_bits(dtype: torch.dtype) -> bool:
    return not _is_continuous(dtype)


_OPERATORS = {
    operator.name: operator
    for operator in (
        Operator("sum", torch.add, _is_number),
        Operator("mean", torch.add, _is_continuous, divides=True),
        Operator("product", torch.mul, _is_number),
        Operator("min", torch.minimum, _is_ordered),
        Operator("max", torch.maximum, _is_ordered),
        Operator("band", torch.bitwise_and, _is_bits),
        Operator("bor", torch.bitwise_or, _is_bits),
        Operator("bxor", torch.bitwise_xor, _is_bits),
    )
}


def operator(name: str, dtype: torch.dtype) -> Operator:
    """Returns the reduction of that name.

    Raises:
        UnsupportedOp: there is none of that name, or not for this dtype.
    """
    found = _OPERATORS.get(name)
    if found is None:
        raise UnsupportedOp(f"op={name!r}: use one of {', '.join(_OPERATORS)}")
    if not found.accepts(dtype):
        raise UnsupportedOp(f"op={name!r} has no meaning for {dtype}: convert the tensor, or use another op")
    return found


_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.complex32: torch.complex64}
"""Where torch lacks the arithmetic; what overflows wraps around as it would in the narrow dtype."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that values of `dtype` are combined in: float32 for 8- and 16-bit floats."""
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return _WIDER.get(dtype, dtype)
