"""Checks that a trace computes the same as its model, in forward and in backward.

A trace has the operations of one forward. So it leaves out what a program gives to the backward alone: a formula of its
own (`torch.autograd.Function`), and hooks of gradients. It repeats numbers that Python code computes anew in each
forward: counters in attributes, and random numbers of Python and NumPy. A pipeline of such a trace would train, with
other gradients. Each of these is refused instead.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from echelon._torch_private.autograd import formula_of
from echelon._torch_private.modules import has_backward_hooks
from echelon._torch_private.tensors import tree_leaves
from echelon.errors import PartitionError

_AS_A_LIST = "or pass a list with one module per stage"

# Functions by which torch itself gives operators their gradients. The operators are in the trace, as they are.
_OF_OPERATORS = ("torch._library.", "torch._higher_order_ops.")


def refuse_backward_hooks(model: nn.Module) -> None:
    """Refuses hooks that a backward calls for a module.

    Raises:
        PartitionError: a module has one.
    """
    for name, module in model.named_modules():
        if has_backward_hooks(module):
            raise PartitionError(
                f"{_layer(name, model)} has a backward hook, which a traced model does not call: remove the hook, "
                f"{_AS_A_LIST}"
            )


class ForwardChecks:
    """Watch on one forward of a model while it is traced."""

    def __init__(self, model: nn.Module) -> None:
        """Makes a watch that has seen nothing. `model`: the model that will be traced."""
        self._model = model
        self._problem = ""
        self._assigned: dict[str, str] = {}
        """Layer and attribute of each tensor without gradient that the forward replaced, by its full name."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the model runs its forward."""
        before, generators = _state(self._model), _random_states()
        hooks = _TensorHooks()
        with hooks:
            yield
        if hooks.found:
            self._note("calls Tensor.register_hook in its forward, and a trace leaves the hook out: do without it")
        if _random_states() != generators:
            self._note(
                "draws random numbers by Python's random or by NumPy, which a trace draws once: draw them by torch"
            )
        self._compare(before, _state(self._model))

    def check_output(self, output: object) -> None:
        """Notes formulas of gradients that the output depends on."""
        nodes = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        seen = set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            if not isinstance(node, BackwardCFunction):
                continue
            formula = formula_of(node)
            if formula.__module__ == "torch.utils.checkpoint":
                self._note("calls torch.utils.checkpoint with use_reentrant=True: use use_reentrant=False")
            elif not formula.__module__.startswith(_OF_OPERATORS):
                self._note(
                    f"computes gradients by {formula.__name__}, a torch.autograd.Function, whose backward a trace "
                    "leaves out: make it an operator by torch.library.custom_op and its register_autograd"
                )

    def refuse(self, constants: Collection[str]) -> None:
        """Raises an error for the first thing that was noted.

        Args:
            constants: full names of the tensors, other than parameters and buffers, that the trace reads.

        Raises:
            PartitionError: the trace would compute something else than the model.
        """
        for name in constants:
            if name in self._assigned:
                self._note(self._assigned[name])
        if self._problem:
            raise PartitionError(f"the {type(self._model).__name__} {self._problem}, {_AS_A_LIST}")

    def _note(self, problem: str) -> None:
        self._problem = self._problem or problem

    def _compare(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        for name, value in before.items():
            now = after.get(name)
            if now is value or (_is_number(value) and (not _is_number(now) or now == value)):
                continue
            changes = f"changes {name} in its forward, which a trace does once: "
            if not isinstance(value, torch.Tensor):
                self._note(f"{changes}keep the number in a buffer, and change it in place")
            elif name in self._buffers():
                self._note(f"{changes}write to the buffer in place, as by {name.rpartition('.')[2]}.copy_()")
            else:
                self._assigned[name] = f"{changes}register it as a buffer, and write to it in place"

    def _buffers(self) -> set[str]:
        return {name for name, _ in self._model.named_buffers(remove_duplicate=False)}


class _TensorHooks(TorchFunctionMode):
    """Detector of hooks of tensors' gradients."""

    found = False

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.found = self.found or func is torch.Tensor.register_hook
        return func(*args, **(kwargs or {}))


def _state(model: nn.Module) -> dict[str, Any]:
    """Returns the numbers, buffers and other tensors that are attributes of the model's modules, by full name."""
    return {
        f"{prefix}.{name}".lstrip("."): value
        for prefix, module in model.named_modules()
        for name, value in (*vars(module).items(), *module.named_buffers(recurse=False))
        if name != "training" and (_is_number(value) or isinstance(value, torch.Tensor))
    }


def _is_number(value: object) -> bool:
    return type(value) in (bool, int, float)  # not a size of an input, which torch.SymInt stands for


def _random_states() -> object:
    state = np.random.get_state(legacy=False)
    return random.getstate(), repr(state)


def _layer(name: str, model: nn.Module) -> str:
    return f"layer {name!r}" if name else f"the {type(model).__name__}"
