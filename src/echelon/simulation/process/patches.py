"""Attributes of installed packages that the program sets, such as `torch.load = my_load`.

Strategy. While a simulation runs, modules are of a class that notes assignments. From the first assignment by the
program's own code on, the attribute is exchanged between ranks. An assignment by an installed package is shared: a
package makes it once, as it is imported. Python offers no such place for classes. For a script their attributes are
compared at the end, and named.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import torch

from echelon.call_site import IMPORT, is_foreign, outwards
from echelon.simulation.process.state import State

_MOCK = os.path.join("unittest", "mock.py")
"""File of the standard library that assigns for the code that calls it."""
_ROOTS = (torch.nn.Module, torch.optim.Optimizer, torch.utils.data.Dataset, torch.utils.data.DataLoader)
"""Classes that are compared, with their subclasses."""
_MISSING: Any = object()
"""Value of an attribute that a module does not have."""
_set_unnoted = ModuleType.__setattr__
"""Sets an attribute of a module. A method in Python would take a third of a simulation: there are thousands."""


class _Key(NamedTuple):
    module: ModuleType
    name: str


class _Watched(ModuleType):
    """Class of every module while a simulation runs."""

    def __setattr__(self, name: str, value: object) -> None:
        _on_change(self, name, sys._getframe(1))
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        # Libraries that pickle functions, such as cloudpickle, have a way for modules of their plain class alone.
        return importlib.import_module, (self.__name__,)

    def __delattr__(self, name: str) -> None:
        _on_change(self, name, sys._getframe(1))
        super().__delattr__(name)


def _on_change(module: ModuleType, name: str, frame: FrameType) -> None:
    if _patches is not None:
        _patches.note(module, name, frame)


class Patches(State):
    """Attributes of installed modules that the program of a rank has assigned or deleted.

    It has to come before other kinds of state: they know better with what a rank begins.
    """

    def __init__(self, is_rank: Callable[[], bool], has_own_modules: bool) -> None:
        """Starts without attributes.

        Args:
            is_rank: whether the calling thread is a rank.
            has_own_modules: whether each rank imports the modules of the program for itself.
        """
        self._is_rank = is_rank
        self._has_own_modules = has_own_modules
        self._outside: dict[_Key, Any] = {}
        """Values from before the program changed them."""
        self.notes: list[str] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, assignments are noted. Afterwards the attributes are as before."""
        global _patches  # the class of modules has no other place for it
        # 4 ms, as much as a small simulation takes: a script takes longer by far.
        classes = _attributes_of_classes() if self._has_own_modules else {}
        _patches = self
        # Modules that are imported meanwhile are watched too: the interpreter makes them of the class of `sys`.
        for module in _modules(ModuleType):
            _set_unnoted(module, "__class__", _Watched)
        try:
            yield
        finally:
            _patches = None
            for module in _modules(_Watched):
                _set_unnoted(module, "__class__", ModuleType)
            self.put({})
            self._outside.clear()
            self._restore(classes)

    def note(self, module: ModuleType, name: str, frame: FrameType) -> None:
        """Notes that an attribute of a module is about to be changed in a frame."""
        path = frame.f_code.co_filename
        if (is_foreign(path) and not path.endswith(_MOCK)) or not self._is_rank() or not _is_installed(module):
            return
        key = _Key(module, name)
        if key not in self._outside and (self._has_own_modules or not _is_in_import(frame)):
            self._outside[key] = vars(module).get(name, _MISSING)

    def first(self, rank: int) -> dict[_Key, Any]:  # noqa: ARG002, D102
        return {}

    def take(self) -> dict[_Key, Any]:  # noqa: D102
        return {key: vars(key.module).get(key.name, _MISSING) for key in self._outside}

    def put(self, state: dict[_Key, Any]) -> None:  # noqa: D102
        for key, outside in self._outside.items():
            value = state.get(key, outside)
            if value is _MISSING:
                vars(key.module).pop(key.name, None)
            else:
                vars(key.module)[key.name] = value

    def _restore(self, before: dict[type, dict[str, Any]]) -> None:
        for owner, attributes in before.items():
            for name, value in list(vars(owner).items()):
                old = attributes.get(name, _MISSING)
                if value is not old and (code := _code_of_program(value)) is not None:
                    self.notes.append(
                        f"{owner.__module__}.{owner.__qualname__}.{name} was set to the function at "
                        f"{code.co_filename}:{code.co_firstlineno}: unlike processes, simulated ranks share classes, "
                        "so each rank had what the last one set"
                    )
                    if old is _MISSING:
                        delattr(owner, name)
                    else:
                        setattr(owner, name, old)


_patches: Patches | None = None
"""Patches of the simulation that runs."""


def _modules(kind: type[ModuleType]) -> list[ModuleType]:
    """Returns the modules of exactly one class. A module of another class has a way of its own."""
    return [module for module in list(sys.modules.values()) if type(module) is kind]


def _is_installed(module: ModuleType) -> bool:
    """Whether ranks share a module. One of the program belongs to a rank, or the program shares it on purpose."""
    path = vars(module).get("__file__")
    return path is None or is_foreign(path)


def _is_in_import(frame: FrameType) -> bool:
    return any(each.f_code.co_filename == IMPORT for each in outwards(frame))


def _attributes_of_classes() -> dict[type, dict[str, Any]]:
    found: dict[type, dict[str, Any]] = {}
    left: list[type] = list(_ROOTS)
    while left:
        owner = left.pop()
        if owner not in found:
            left += type.__subclasses__(owner)
            path = getattr(sys.modules.get(owner.__module__), "__file__", None)
            if path is not None and is_foreign(path):
                found[owner] = dict(vars(owner))
    return found


def _code_of_program(value: object) -> CodeType | None:
    """Returns the code of a function that the program has defined. None for other values."""
    code = getattr(value, "__code__", None)
    return code if isinstance(code, CodeType) and not is_foreign(code.co_filename) else None
