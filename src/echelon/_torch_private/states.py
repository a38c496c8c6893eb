"""State of a module between two calls: its hooks, flags and tensors, and the state of DDP and FSDP that hold it."""

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
"""Lists of FSDP2 that each forward makes longer, and its backward shorter. FSDP2 prefetches by them in backward."""
_ACCUMULATED = "unsharded_accumulated_grad"
"""Gradient that FSDP2 keeps while microbatches add to it."""
_OF_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_state"


class ModuleState(NamedTuple):
    """State of a module with all that it holds."""

    facts: Hashable
    """Equal for two calls that do the same with tensors of equal form."""
    gradients: Hashable
    """The same for two backward passes."""
    tensors: tuple[torch.Tensor | None, ...]
    """Tensors of the state, in the order of the facts. None where there is no gradient."""


def state_of(module: nn.Module) -> ModuleState:
    """Returns the state of a module as it is now."""
    found = _Found()
    for each in module.modules():
        found.facts.append((id(each), *(tuple(getattr(each, name)) for name in _HOOKS)))
        found.describe(vars(each))
        for tensor in (*each.parameters(recurse=False), *each.buffers(recurse=False)):
            found.describe_tensor(tensor)
        if (state := _fsdp2_state(each)) is not None:
            found.describe_object(state)
    return ModuleState(tuple(found.facts), tuple(found.gradients), tuple(found.tensors))


def _fsdp2_state(module: nn.Module) -> Any:
    fsdp2 = sys.modules.get(_OF_FSDP2)  # imported by whoever uses it
    return None if fsdp2 is None else fsdp2._get_module_fsdp_state(module)


class _Found:
    """Facts and tensors so far."""

    def __init__(self) -> None:
        self.facts: list[Hashable] = []
        self.gradients: list[Hashable] = []
        self.tensors: list[torch.Tensor | None] = []
        self._seen: set[int] = set()

    def describe(self, values: dict[str, Any]) -> None:
        """Adds plain values and tensors of an object and of FSDP's objects inside of it."""
        for name, value in values.items():
            if name in _ORDERS:
                continue
            if name == _ACCUMULATED:
                self._describe_gradient(value)
            elif isinstance(value, _PLAIN):
                self.facts.append((name, value))
            elif isinstance(value, torch.Tensor):
                self.describe_tensor(value)
            elif isinstance(value, list | tuple | dict | set):
                self.facts.append((name, len(value)))
            if _is_of_parallelism(value):
                self.describe_object(value)
            elif isinstance(value, list) and value and _is_of_parallelism(value[0]):
                for each in value:
                    self.describe_object(each)

    def describe_object(self, value: Any) -> None:
        """Adds the state of an object of FSDP."""
        has_values = hasattr(value, "__dict__")
        self.facts.append(id(value) if has_values else type(value).__name__)
        if has_values and id(value) not in self._seen:
            self._seen.add(id(value))
            self.describe(vars(value))

    def describe_tensor(self, tensor: torch.Tensor | None) -> None:
        """Adds a tensor with its gradient."""
        if tensor is None:
            self.facts.append(None)
            return
        self.facts.append((type(tensor).__name__, tensor.requires_grad, tensor.shape, tensor.dtype))
        self.tensors.append(local_part(tensor))
        # torch refuses to tell it of a view whose base has changed, such as FSDP1's parameter of an earlier forward.
        is_leaf = isinstance(tensor, nn.Parameter) or (not tensor._is_view() and tensor.is_leaf)
        self._describe_gradient(tensor.grad if is_leaf else None)

    def _describe_gradient(self, gradient: torch.Tensor | None) -> None:
        self.gradients.append(None if gradient is None else (gradient.shape, gradient.dtype))
        self.tensors.append(None if gradient is None else local_part(gradient))


def _is_of_parallelism(value: object) -> bool:
    """Whether an object is one of FSDP's own, such as a group of parameters."""
    return (
        type(value).__module__.startswith("torch.distributed.fsdp.")
        and not isinstance(value, nn.Module | torch.Tensor | Iterator | Enum)
        and not isinstance(value, type)
    )
