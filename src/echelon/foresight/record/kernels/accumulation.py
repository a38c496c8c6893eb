"""Operators by which autograd adds up gradients. Without a mode torch applies them in place."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from echelon._torch_private.autograd import is_in_backward
from echelon._torch_private.tensors import DispatchMode, real_tensors, references, without_functions
from echelon.foresight.record.log.callers import ENGINE, calling_file

_ATEN = torch.ops.aten
_IN_PLACE = {
    _ATEN.index_add.default: _ATEN.index_add_.default,
    _ATEN.index_put.default: _ATEN.index_put_.default,
    _ATEN.put.default: _ATEN.put_.default,
    _ATEN.scatter.src: _ATEN.scatter_.src,
    _ATEN.scatter_add.default: _ATEN.scatter_add_.default,
}
"""Operators that autograd applies to fake zeros, with their forms in place, which ordinary zeros get."""


def in_place(func: Any, args: tuple[Any, ...], usual: tuple[int, int, int]) -> Any:
    """Returns the form in place of an operator that autograd would apply in place without a mode.

    Args:
        func, args: the operator and its arguments.
        usual: see `usual_references`.
    """
    if func is _ATEN.add.Tensor:
        return _ATEN.add_.Tensor if _adds_to_gradient(args, usual) else func
    form = _IN_PLACE.get(func)
    return form if form is not None and _adds_to_zeros(args) else func


def _adds_to_zeros(args: Sequence[Any]) -> bool:
    """Whether torch's own formula, which is C++, makes a gradient from zeros by one of the operators `_IN_PLACE`."""
    # The gradient of an assignment to positions puts without adding, and not into zeros.
    is_added = len(args) > 3 and args[3] is not False
    return is_added and not torch.is_grad_enabled() and is_in_backward() and calling_file().endswith(ENGINE)


class _References(DispatchMode):  # type: ignore[no-untyped-call]
    """Sees the references to a gradient to which autograd adds another one, if nobody else has it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: tuple[int, int, int] = 0, 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _ATEN.add.Tensor:
            self.seen = references(args[0])
        return func(*args, **(kwargs or {}))


@functools.cache
def usual_references() -> tuple[int, int, int]:
    """Returns the references to such a gradient in a mode, which depend on torch's version."""
    with real_tensors(), torch.enable_grad():
        inputs = 2 * torch.ones(1, requires_grad=True)
        mode = _References()
        with mode:
            torch.autograd.backward(inputs.sin() * inputs.cos())
    return mode.seen


def _adds_to_gradient(args: Sequence[Any], usual: tuple[int, int, int]) -> bool:
    """Whether autograd adds up the gradients of a tensor that is used twice. In a mode it does so in a new tensor.

    Without a mode it adds in place, if the gradient is dense and nobody else has it.
    """
    if torch.is_grad_enabled() or not is_in_backward() or not all(isinstance(each, Tensor) for each in args):
        return False
    if any(found > most for found, most in zip(references(args[0]), usual, strict=True)):
        return False
    with without_functions():
        total, part = args
        is_alike = total.shape == part.shape and total.dtype == part.dtype and total.device == part.device
        span = sum((size - 1) * stride for size, stride in zip(total.shape, total.stride(), strict=True))
        return is_alike and span == total.numel() - 1 and calling_file().endswith(ENGINE)
