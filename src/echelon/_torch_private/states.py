"""State of a module between two calls: its hooks, flags and tensors, and the state of DDP and FSDP that hold it."""

from __future__ import annotations

import dis
import functools
import random
import sys
import weakref
from collections import deque
from collections.abc import Hashable, Iterator
from enum import Enum
from itertools import chain
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from echelon._torch_private.modules import precision_of
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
_OWN = __name__.partition(".")[0]
_LISTS = (list, tuple, dict, set, deque)
_MOST = 1000
"""Elements of a list up to which its numbers are facts."""
_NUM_BATCHES = "num_batches_tracked"
"""Buffer of batch normalization that counts its calls, which do the same for each number."""


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
    for each in nn.Module.modules(module):
        hooks = [getattr(each, name) for name in _HOOKS]
        found.facts.append((id(each), type(each), *map(tuple, hooks)))
        for function in (each.forward, *chain.from_iterable(map(dict.values, hooks))):
            found.describe_function(function)
        found.describe(vars(each))
        for name, tensor in (*each.named_parameters(recurse=False), *each.named_buffers(recurse=False)):
            if name != _NUM_BATCHES:
                found.describe_tensor(tensor)
        if (state := _fsdp2_state(each)) is not None:
            found.describe_object(state)
    return ModuleState(tuple(found.facts), tuple(found.gradients), tuple(found.tensors))


def surroundings(module: nn.Module) -> Hashable | None:
    """Returns the settings of torch that a call of a module depends on. None if hooks of tensors see its graph.

    Such hooks are functions of the program or of torch, and may differ in each call or count their calls. Hooks of
    this package do not.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return None
    for each in nn.Module.parameters(module):
        hooks = (*(each._backward_hooks or {}).values(), *(each._post_accumulate_grad_hooks or {}).values())
        if any(type(hook).__module__.partition(".")[0] != _OWN for hook in hooks):
            return None
    cuda: Any = torch.backends.cuda
    return (
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        tuple(precision_of("cuda", each) for each in ("matmul", "conv", "rnn")),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
    )


def random_numbers() -> int:
    """Returns a number for the state of the generators of Python and NumPy: another one if a number was drawn."""
    numpy = sys.modules.get("numpy")
    state = {"state": {}} if numpy is None else numpy.random.get_state(legacy=False)  # a dict for any generator
    numbers = [each if isinstance(each, int) else each.tobytes() for each in state["state"].values()]
    return hash((random.getstate(), *numbers, state.get("gauss")))


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
            elif isinstance(value, torch.Tensor):
                self.describe_tensor(value)
            elif isinstance(value, list) and value and _is_of_parallelism(value[0]):
                self.facts.append((name, len(value)))
                for each in value:
                    self.describe_object(each)
            elif isinstance(value, _PLAIN + _LISTS):
                self.facts.append((name, _plain(value)))
            elif isinstance(value, FunctionType | MethodType | BuiltinFunctionType):
                # By reference: the next function may get the address of this one.
                self.facts.append((name, weakref.ref(value)))
                self.describe_function(value)
            elif _is_of_parallelism(value):
                self.describe_object(value)
            elif hasattr(value, "__dict__") and _is_of_program(type(value)) and id(value) not in self._seen:
                # An object such as a configuration. Objects inside of it are left out.
                self._seen.add(id(value))
                self.facts.append((name, id(value), *map(_plain, vars(value).values())))

    def describe_function(self, function: Any) -> None:
        """Adds plain variables that a function of the program refers to, such as a counter of its calls."""
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType) and _is_of_program(function):
            names = [function.__globals__.get(name) for name in _globals_in(function.__code__)]
            self.facts.append((*map(_plain, names), *map(_in_cell, function.__closure__ or ())))

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


@functools.cache
def _globals_in(code: CodeType) -> tuple[str, ...]:
    """Returns the names of the global variables that code reads. `co_names` has the names of attributes, too."""
    return tuple(dict.fromkeys(each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"))


def _in_cell(cell: CellType) -> Hashable:
    try:
        return _plain(cell.cell_contents)
    except ValueError:  # It is empty.
        return None


def _plain(value: object) -> Hashable:
    """Returns a plain value, or the plain values in a list. None for others."""
    if isinstance(value, _LISTS):
        inner = value.values() if isinstance(value, dict) else value
        return len(value), *(each for each in (inner if len(value) <= _MOST else ()) if isinstance(each, _PLAIN))
    return value if isinstance(value, _PLAIN) else None


def _is_of_program(value: FunctionType | type) -> bool:
    return str(value.__module__).partition(".")[0] not in ("torch", "echelon")


def _is_of_parallelism(value: object) -> bool:
    """Whether an object is one of FSDP's own, such as a group of parameters."""
    return (
        type(value).__module__.startswith("torch.distributed.fsdp.")
        and not isinstance(value, nn.Module | torch.Tensor | Iterator | Enum)
        and not isinstance(value, type)
    )
