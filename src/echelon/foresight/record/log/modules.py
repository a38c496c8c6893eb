"""Names of the modules whose forward runs, by hooks of all modules."""

from __future__ import annotations

import sys
import weakref
from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from echelon._torch_private.autograd import accumulated_leaf
from echelon._torch_private.distributed import modules_of_parameters
from echelon._torch_private.tensors import has_symbols, tree_map
from echelon.call_site import OF_FSDP2, kind_of
from echelon.foresight.record.log.log import Log
from echelon.foresight.record.log.memory import Memory
from echelon.foresight.record.log.placement import Placement

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
"""Names under which wrappers hold their module."""
_HOLDERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "DDP"})
"""Wrappers that hold their module as "module"."""

_MOVING = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})
"""Wrappers of torch that move their arguments to the GPU, and FSDP its parameters."""


class Modules:
    """Stack of the modules whose forward runs in one rank."""

    def __init__(self, log: Log, memory: Memory, placement: Placement | None = None) -> None:
        self._log = log
        self._memory = memory
        self._placement = placement
        self._stack: list[int] = []
        self._compiling: list[tuple[nn.Module, AbstractContextManager[None]]] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        # By identity: two parameters are equal element by element.
        self._of_parameters: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
        self._settled: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Modules whose parameters have a device."""

    def watch(self) -> None:
        """Registers the hooks, which the calling rank has for itself."""
        self._log.owner = self._owner
        register_module_forward_pre_hook(self._enter)
        # always_call: also after a forward that has raised, which would stay on the stack.
        register_module_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any) -> Any:
        """Notes that the forward of a module begins. Returns its arguments, None if they stay where they are."""
        moved = None
        if has_symbols():  # in an export: the module is only traced
            return moved
        name = self._names.get(module)
        if name is None:
            self._name_all(module)
            name = self._names[module]
            if self._placement is not None and _moves(module):
                # A program may give these names to attributes of its own, as Megatron does.
                self._placement.forget((*nn.Module.parameters(module), *nn.Module.buffers(module)))
                if module not in self._placement.still:
                    module.register_forward_pre_hook(self._moved_by, with_kwargs=True)
                    # torch calls a new hook only from the next call on.
                    # Nor does it give keywords to this one, which are in the frame that calls it.
                    given = sys._getframe(1).f_locals.get("kwargs")
                    kwargs = given if isinstance(given, dict) else {}
                    moved, keywords = self._moved_by(module, args, kwargs)
                    kwargs.update(keywords)
            if any(map(_moves, nn.Module.modules(module))):
                self._settled.update(nn.Module.modules(module))
        if self._placement is not None and module not in self._settled:
            self._settled.add(module)
            self._placement.called(module, (args, sys._getframe(1).f_locals.get("kwargs")))
        self._stack.append(self._log.modules.of(name))
        self._log.enter(self._stack[-1])
        if module in self._log.compiled:
            self._compiling.append((module, self._log.compiling()))
            self._compiling[-1][1].__enter__()
        return moved

    def _moved_by(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Returns the arguments of a module that moves them to its GPU."""
        assert self._placement is not None
        return tree_map(self._placement.arrived, (args, kwargs))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if has_symbols():
            return
        if self._compiling and self._compiling[-1][0] is module:
            self._compiling.pop()[1].__exit__(None, None, None)
        # A forward that recomputes may be stopped early: torch then calls the hooks of the modules that it was in.
        if self._stack:
            self._stack.pop()
        # Nodes that a backward makes outside of modules belong to none.
        self._log.enter(self._stack[-1] if self._stack else -1)

    def _owner(self) -> int:
        """Returns the module for whose parameters a backward communicates. -1 if none is known.

        FSDP2 names its modules. DDP starts a bucket once the gradient of its last parameter is there.
        """
        if (leaf := accumulated_leaf()) is not None and (name := self._of_parameters.get(leaf)) is not None:
            return self._log.modules.of(name)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (kind := kind_of(frame.f_code.co_filename)):
            if kind == OF_FSDP2:
                for module in modules_of_parameters(frame.f_locals.get("self")):
                    if (name := self._names.get(module)) is not None:
                        return self._log.modules.of(name)
            frame = frame.f_back
        return -1

    def _name_all(self, root: nn.Module) -> None:
        if self._stack:  # made after its parent was first called
            self._names[root] = f"{list(self._log.modules)[self._stack[-1]]}.{type(root).__name__}"
            return
        first = ["module"] if type(root).__name__ in _HOLDERS else None
        for path, module in nn.Module.named_modules(root):
            parts = [part for part in path.split(".") if part not in _WRAPPERS]
            if parts[:1] == first:
                parts = parts[1:]
            self._names[module] = name = ".".join(parts) or type(module).__name__
            for parameter in nn.Module.parameters(module, recurse=False):
                self._of_parameters[parameter] = name
            # Those that are trained are known by their optimizer. Others are frozen, as of a teacher. In their places
            # `functional_call` puts tensors of other kinds, such as fast weights.
            own = (each for each in nn.Module.parameters(module, recurse=False) if isinstance(each, nn.Parameter))
            self._memory.mark(own, "parameters")
        self._names.setdefault(root, type(root).__name__)  # a wrapper may leave itself out


def _moves(module: nn.Module) -> bool:
    """Whether a module moves its parameters or its arguments to its GPU by itself."""
    return any(each.__name__ in _MOVING for each in type(module).__mro__)
