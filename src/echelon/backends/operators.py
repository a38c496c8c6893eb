"""Reductions: their names, functions, and the dtypes that they accept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.distributed import ReduceOp

from echelon._native import OPS, combine, use_tensors
from echelon.arguments import choices
from echelon.errors import UnsupportedOp

Combine = Callable[[torch.Tensor, torch.Tensor], object]
"""Combines the second tensor into the first, in place."""


class Function(Protocol):
    """Signature of torch's elementwise functions of two tensors."""

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
        """Turns the combination of all ranks into the result, in place: a mean is divided by `num_ranks`."""
        if not self.divides:
            return total
        if total.is_floating_point() and num_ranks & (num_ranks - 1) == 0:
            return total.mul_(1 / num_ranks)  # by a power of two it is the same bits, in less time
        return total.div_(num_ranks)


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Where torch lacks the arithmetic, which is the same bits for numbers with a sign; what overflows wraps around."""
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_SIGNED}


def _is_continuous(dtype: torch.dtype) -> bool:
    return dtype.is_complex or (dtype.is_floating_point and dtype != torch.float4_e2m1fn_x2)  # two numbers in one


def _is_number(dtype: torch.dtype) -> bool:
    return dtype in _INTEGERS or _is_continuous(dtype)


def _is_ordered(dtype: torch.dtype) -> bool:
    return not dtype.is_complex and (dtype == torch.bool or _is_number(dtype))


def _is_bits(dtype: torch.dtype) -> bool:
    return dtype == torch.bool or dtype in _INTEGERS


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


OP_NUMBERS = {name: number for number, name in enumerate(OPS)}
"""Reductions that the native library has, as it numbers them."""
use_tensors(torch.Tensor.__dlpack_c_exchange_api__, torch.Tensor, torch.nn.Parameter, None)


_TORCH_NAMES = {"avg": "mean", **{name.upper(): name for name in _OPERATORS}, "AVG": "mean"}
"""How torch.distributed.ReduceOp spells them."""


def check_op(op: object) -> str:
    """Returns the name of a reduction, which may be given in torch's spelling: "avg", or ReduceOp.AVG.

    Raises:
        UnsupportedOp: there is none of that name.
    """
    if isinstance(op, str) and op in _OPERATORS:
        return op
    name = op if isinstance(op, str) else str(op).rpartition(".")[2] if isinstance(op, ReduceOp.RedOpType) else None
    if name in _TORCH_NAMES:
        return _TORCH_NAMES[name]
    raise UnsupportedOp(f"op={op!r}: {choices(op, [*_OPERATORS, 'avg'])}")


@functools.lru_cache(256)
def operator(name: str, dtype: torch.dtype) -> Operator:
    """Returns the reduction of that name, for tensors of `accumulation_dtype(dtype)`.

    Raises:
        UnsupportedOp: there is none of that name, or not for this dtype.
    """
    found = _OPERATORS[check_op(name)]
    if not found.accepts(dtype):
        raise UnsupportedOp(f"op={name!r} has no meaning for {dtype}: convert the tensor, or use another op")
    if dtype not in _SIGNED:
        return found
    return replace(found, function=_with_sign(found.function, _SIGNED[dtype], is_order=name in ("min", "max")))


def _with_sign(function: Function, signed: torch.dtype, is_order: bool) -> Function:
    """Returns a function of unsigned integers that runs on signed ones.

    XOR with the lowest signed number maps the order of unsigned integers to that of signed ones.
    """
    lowest = torch.iinfo(signed).min

    def apply(input: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        left, right, result = input.view(signed), other.view(signed), out.view(signed)
        if is_order:
            function(left ^ lowest, right ^ lowest, out=result)
            result ^= lowest
        else:
            function(left, right, out=result)
        return out

    return apply


@functools.cache
def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that values of `dtype` are combined in: float32 for 8- and 16-bit floats."""
    if dtype == torch.complex32:
        return torch.complex64
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


_HALVES = (torch.bfloat16, torch.float16)
"""Types of which torch combines two tensors as float32 and rounds the result once."""
_BLOCK = 32 << 10
"""Elements combined at a time as float32. Two such blocks stay in the cache."""
_scratch: list[tuple[torch.Tensor, torch.Tensor]] = []
"""Blocks of float32 that no thread uses at the moment: fresh ones cost more than the sum, by page faults."""


def combine_in_order(target: torch.Tensor, parts: Sequence[torch.Tensor], operator: Operator) -> None:
    """Reduces the parts in their order into `target`, which may be one of them.

    8- and 16-bit floats are combined as float32, and rounded once at the end instead of at every step.
    """
    # Fast path: one pass over all parts, for contiguous tensors of the common dtypes.
    op = OP_NUMBERS.get(operator.name)
    if op is not None and combine(op, target, *parts):
        return
    dtype = target.dtype
    wide = accumulation_dtype(dtype)
    # A mean would be rounded twice.
    if len(parts) == 2 and not operator.divides and (wide is dtype or dtype in _HALVES):
        operator.function(parts[0], parts[1], out=target)
        return
    first, second, *others = parts
    # A part that is the target would be overwritten by the first step if it came third or later.
    if wide is dtype and not (others and any(part is target for part in others)):
        function = operator.function
        function(first, second, out=target)
        for part in others:
            function(target, part, out=target)
        if operator.divides:
            operator.finish(target, len(parts))
        return
    # Up to two blocks the allocator has memory that was used before.
    if (
        target.numel() > 2 * _BLOCK
        and wide is torch.float32
        and all(tensor.is_contiguous() for tensor in (target, *parts))
    ):
        _combine_in_blocks(target.view(-1), [part.view(-1) for part in parts], operator)
        return
    total = first.to(wide, copy=True)
    for part in (second, *others):
        operator.combine(total, part.to(wide))
    target.copy_(operator.finish(total, len(parts)))


def _combine_in_blocks(target: torch.Tensor, parts: Sequence[torch.Tensor], operator: Operator) -> None:
    """Reduces parts of one dimension into `target`, as float32, one block after another."""
    own, other = _scratch.pop() if _scratch else _new_scratch()
    try:
        for place, first, *others in zip(*(torch.split(tensor, _BLOCK) for tensor in (target, *parts)), strict=True):
            is_whole = len(place) == _BLOCK
            total, term = (own, other) if is_whole else (own[: len(place)], other[: len(place)])
            total.copy_(first)
            for part in others:
                operator.combine(total, term.copy_(part))
            place.copy_(operator.finish(total, len(parts)))
    finally:
        _scratch.append((own, other))


def _new_scratch() -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.empty(_BLOCK, dtype=torch.float32, device="cpu")
    return own, torch.empty_like(own)
