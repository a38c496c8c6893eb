"""Private interfaces of torch about modules, optimizers, the compiler and the profiler."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from echelon._torch_private.tensors import FakeTensor, local_part

F = TypeVar("F", bound=Callable[..., Any])

COMPILED, RECOMPUTED = "_orig_mod", "_checkpoint_wrapped_module"
"""Attributes in which the wrappers of torch.compile and of activation checkpointing hold their module. In the names of
parameters and buffers they are left out: a checkpoint has the names of the plain model."""


def never_compiled(function: F) -> F:
    """Decorator of a function that torch.compile does not compile, nor any function that it calls.

    `torch.compiler.disable` does the same in each call, and imports torch's compiler, which takes a second.
    """
    strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, strategy)
    return function


def hooks_of_all_modules() -> dict[str, Any]:
    """Returns torch's hooks for all modules, as of `register_module_forward_hook`, by their private names."""
    return {name: value for name, value in vars(torch.nn.modules.module).items() if name.startswith("_global_")}


def print_options() -> tuple[Any, str]:
    """Returns the module that has the options of `torch.set_printoptions`, and their private name."""
    return torch._tensor_str, "PRINT_OPTS"


def precision_of(backend: str, operation: str) -> str:
    """Returns the precision of float32 of a backend, such as that of `torch.backends.cuda.matmul.fp32_precision`.

    The public attributes of some backends read one value and set another one.
    """
    found: str = torch._C._get_fp32_precision_getter(backend, operation)
    return found


@contextmanager
def precisions_set_by(wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> Iterator[None]:
    """Inside, torch sets a precision of float32 by a wrapper of its own function of backend, operation and value."""
    native: Any = torch._C
    original = native._set_fp32_precision_setter
    native._set_fp32_precision_setter = wrap(original)
    try:
        yield
    finally:
        native._set_fp32_precision_setter = original


@contextmanager
def devices_as_on_gpu() -> Iterator[None]:
    """Inside, torch finds an accelerator, "cuda", by a private function."""
    find = torch._C._get_accelerator
    torch._C._get_accelerator = lambda *_: torch.device("cuda")
    try:
        yield
    finally:
        torch._C._get_accelerator = find


@contextmanager
def optimizers_as_on_gpu() -> Iterator[None]:
    """Inside, optimizers and gradient clipping handle many parameters at once by default, as for tensors of a GPU.

    torch asks private functions which devices and types of tensors can be handled so. A private function in C++ groups
    them, without a look at the devices that they say in Python.
    """
    name = "_get_foreach_kernels_supported_devices"
    optimizers: Any = importlib.import_module("torch.optim.optimizer")  # no attribute of its package
    original, types = optimizers._get_foreach_kernels_supported_devices, optimizers._foreach_supported_types
    modules = torch.utils._foreach_utils, optimizers
    for module in modules:
        setattr(module, name, lambda: [*original(), "cpu"])
    types.append(FakeTensor)
    group = torch._C._group_tensors_by_device_and_dtype
    torch._C._group_tensors_by_device_and_dtype = partial(_grouped_by_device, group)
    try:
        yield
    finally:
        torch._C._group_tensors_by_device_and_dtype = group
        types.remove(FakeTensor)
        for module in modules:
            setattr(module, name, original)


def _grouped_by_device(group: Callable[..., Any], lists: Any, with_indices: bool = False) -> dict[Any, Any]:
    """Groups tensors, and lists parallel to them, by the device that each tensor of the first list says."""
    found = {}
    for (_, dtype), (parts, indices) in group(lists, with_indices).items():
        devices = [local_part(each).device for each in parts[0]]
        for device in dict.fromkeys(devices):
            chosen = [position for position, each in enumerate(devices) if each == device]
            own = [[part[position] for position in chosen] if part else part for part in parts]
            found[device, dtype] = own, [indices[position] for position in chosen] if indices else indices
    return found


@contextmanager
def profilers_that_ask(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Inside, every profiler of torch calls `begin` before its session starts, and `end` after it has ended.

    `torch.profiler` starts the sessions of `torch.autograd.profiler` by a private method, for which there is no hook.
    """
    profiler: Any = torch.autograd.profiler.profile
    prepare, leave = profiler._prepare_trace, profiler.__exit__

    def prepare_trace(self: Any) -> Any:
        begin()
        return prepare(self)

    def exit_session(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            if self.enabled:
                end()

    profiler._prepare_trace, profiler.__exit__ = prepare_trace, exit_session
    try:
        yield
    finally:
        profiler._prepare_trace, profiler.__exit__ = prepare, leave
