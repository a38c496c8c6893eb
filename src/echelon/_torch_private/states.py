"""State of a module between two calls: its hooks, flags and tensors, and those of DDP and FSDP that hold it."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

from echelon._torch_private.tensors import local_part

_PLAIN = (bool, int, float, str, type(None), Enum, torch.dtype, torch.device)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_ORDERS = frozenset({"_post_forward_indices", "post_forward_order"})
"""Lists of FSDP2 that each forward makes longer, and its backward shorter. Its backward prefetches by them."""
_OF_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_state"


class ModuleState(NamedTuple):
    """State of a module with all that it holds."""

    facts: Hashable
    """Equal for two calls that do the same with tensors of equal form."""
    tensors: tuple[torch.Tensor | None, ...]
    """Tensors of the state, in the order of the facts. None where there is no gradient."""


def state_of(module: nn.Module) -> ModuleState:
    """Returns the state of a module as it is now."""
    facts: list[Hashable] = []
    tensors: list[torch.Tensor | None] = []
    seen: set[int] = set()
    for each in module.modules():
        facts.append((id(each), *(tuple(getattr(each, name)) for name in _HOOKS)))
        _describe(each, vars(each), facts, tensors, seen)
        for tensor in (*each._parameters.values(), *each._buffers.values()):
            _describe_tensor(tensor, facts, tensors)
        if (state := _fsdp2_state(each)) is not None:
            _describe_object(state, facts, tensors, seen)
    return ModuleState(tuple(facts), tuple(tensors))


def _fsdp2_state(module: nn.Module) -> Any:
    fsdp2 = sys.modules.get(_OF_FSDP2)  # imported by whoever uses it
    return None if fsdp2 is None else fsdp2._get_module_fsdp_state(module)


def _describe(
    owner: object, values: dict[str, Any], facts: list[Hashable], tensors: list[torch.Tensor | None], seen: set[int]
) -> None:
    """Adds plain values and tensors of an object, and those of FSDP's objects inside of it."""
    for name, value in values.items():
        if name in _ORDERS:
            continue
        if isinstance(value, _PLAIN):
            facts.append((name, value))
        elif not isinstance(owner, nn.Module):
            if isinstance(value, torch.Tensor):
                _describe_tensor(value, facts, tensors)
            elif isinstance(value, list | tuple):
                facts.append((name, len(value)))
        if _is_of_parallelism(value):
            _describe_object(value, facts, tensors, seen)
        elif isinstance(value, list) and value and _is_of_parallelism(value[0]):
            for each in value:
                _describe_object(each, facts, tensors, seen)


def _describe_object(value: Any, facts: list[Hashable], tensors: list[torch.Tensor | None], seen: set[int]) -> None:
    facts.append(id(value) if hasattr(value, "__dict__") else type(value).__name__)
    if id(value) not in seen and hasattr(value, "__dict__"):
        seen.add(id(value))
        _describe(value, vars(value), facts, tensors, seen)


def _describe_tensor(tensor: torch.Tensor | None, facts: list[Hashable], tensors: list[torch.Tensor | None]) -> None:
    if tensor is None:
        facts.append(None)
        return
    facts.append((type(tensor).__name__, tensor.requires_grad, tensor.shape, tensor.dtype))
    local = local_part(tensor)
    tensors.append(local)
    gradient = tensor.grad if tensor.is_leaf else None
    facts.append(None if gradient is None else (gradient.shape, gradient.dtype))
    tensors.append(None if gradient is None else local_part(gradient))


def _is_of_parallelism(value: object) -> bool:
    """Whether an object is one of FSDP's own, such as a group of parameters."""
    return (
        type(value).__module__.startswith("torch.distributed.fsdp.")
        and not isinstance(value, nn.Module | torch.Tensor | Iterator | Enum)
        and not isinstance(value, type)
    )
