"""Tensors and torch's modes: ordinary tensors inside of `torch.inference_mode()`, and changes that autograd learns of.

Strategy. torch refuses to change a tensor that was made in inference mode once the mode is off. The mode belongs to a
thread, and a message is written by any thread that polls. So the library makes only
ordinary tensors, and works on a user's inference tensor through an ordinary tensor over the same memory. The group
refuses a change that torch refuses, before anything is sent.

Autograd compares a version counter to find out that a saved tensor was changed. Bytes that are copied to an address do
not count there, so every call that overwrites a user's tensor counts for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

P = ParamSpec("P")
T = TypeVar("T")

_AS_IT_IS = nullcontext()


def normal_mode() -> AbstractContextManager[object]:
    """Returns a context in which new tensors are ordinary ones, inside of `torch.inference_mode()` too.

    Where it has to leave inference mode, gradients are recorded inside the context: give it detached tensors.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS


def in_normal_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a function return ordinary tensors that are part of no graph, in inference mode too."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with normal_mode(), torch.no_grad():
            return function(*args, **kwargs)

    return run


def outside_autograd(tensor: Tensor) -> Tensor:
    """Returns an ordinary tensor over the same memory that is part of no graph; the tensor itself if it is such.

    An inference tensor that is a conj or neg view comes back as it is: nobody writes into the memory of one directly.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
        return tensor
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def overwrite(tensor: Tensor, values: Tensor, *, non_blocking: bool = False) -> None:
    """Copies values into a user's tensor, in any thread and any mode."""
    if tensor.is_inference():
        with torch.inference_mode():
            tensor.copy_(values, non_blocking=non_blocking)
    else:
        tensor.detach().copy_(values, non_blocking=non_blocking)


def announce_change(tensor: Tensor) -> None:
    """Tells autograd that a user's tensor is about to be overwritten: a backward that needs its old values fails.

    Raises:
        RuntimeError: torch's own, for an inference tensor outside of inference mode.
    """
    if tensor.is_inference():  # it has no version counter
        if not torch.is_inference_mode_enabled():
            tensor.detach().unsqueeze(0)[:0].zero_()  # torch refuses it even without elements, in its own words
        return
    increment_version(tensor)


def announce_changes(tensors: Sequence[Tensor]) -> None:
    """Does as `announce_change` with many tensors; tells autograd of none if torch refuses one."""
    for tensor in tensors:
        if tensor.is_inference():
            announce_change(tensor)
    increment_version(tensors)
