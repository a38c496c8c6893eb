"""Modules of the user's program, which each simulated rank loads for itself.

Strategy. A finder in front of the others recognizes modules whose file belongs to the program, and notes their names.
The entries of these names in `sys.modules` are exchanged between ranks, and so are the locks under which they are
imported. A rank that waits in the middle of an import therefore holds no lock that another rank needs, which loads the
module for itself. The source of a module is compiled once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from echelon.call_site import is_foreign
from echelon.simulation.process.state import State

_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Parts of the paths of installed packages, wherever they are."""


_LOCKS: dict[str, Any] = importlib._bootstrap._module_locks  # type: ignore[attr-defined] # missing in its stub
"""Locks of imports under way, by module. The interpreter changes this mapping, and never replaces it."""


class _Loaded(NamedTuple):
    """Local modules of one rank."""

    modules: dict[str, ModuleType]
    locks: dict[str, object]
    """Locks of the imports that are under way."""


class MainModule(State):
    """The module `__main__`. A script sets it for its rank, and so does `runpy.run_path(..., run_name="__main__")`."""

    def take(self) -> ModuleType:  # noqa: D102
        return sys.modules["__main__"]

    def put(self, state: ModuleType) -> None:  # noqa: D102
        sys.modules["__main__"] = state


class LocalModules(State):
    """Modules in some folders, of which each rank has its own."""

    def __init__(self, folders: Sequence[str], search: Sequence[str], project: str | None) -> None:
        """Takes the places of the program's modules, which belong to ranks, except installed and extension modules.

        Args:
            folders: Folders of the program.
            search: `sys.path` with which each rank begins. Folders that the program adds to it are the program's, too.
            project: Folder of the program's project. Packages that the process has loaded from there before are shared,
                as those of a checkout of torch that has the script.
        """
        self._folders = _prefixes(folders)
        self._project = () if project is None else _prefixes([project])
        self._search = _prefixes(search)
        self._packages = {name.partition(".")[0] for name in sys.modules}
        self.codes: dict[str, CodeType] = {}
        """Compiled code, by file."""
        self._finder = _Finder(self)
        # A module that was loaded before belongs to the process outside: each rank loads another one.
        self._names = {
            name: None
            for name, module in list(sys.modules.items())
            if name != "__main__" and self.is_local(name, _file_of(module))
        }

    def is_local(self, name: str, path: str | None) -> bool:
        """Whether a module belongs to the program, by its name and its source file or the folder of its package."""
        if not path or is_foreign(path):
            return False
        path = os.path.realpath(path)
        is_installed = any(part in path for part in _INSTALLED) or path.endswith(tuple(EXTENSION_SUFFIXES))
        return self._is_of_program(name, path) and not is_installed and not is_foreign(path)

    def _is_of_program(self, name: str, path: str) -> bool:
        added = tuple(place for place in _prefixes(sys.path) if place not in self._search)
        if path.startswith(self._folders + added):
            return True
        return path.startswith(self._project) and name.partition(".")[0] not in self._packages

    @contextmanager
    def found(self) -> Iterator[None]:
        """Inside, local modules are recognized as they are imported."""
        sys.meta_path.insert(0, self._finder)
        try:
            yield
        finally:
            sys.meta_path.remove(self._finder)

    def note(self, name: str) -> None:
        """Notes the name of a local module, which is about to be imported for the calling rank."""
        self._names[name] = None

    def first(self, rank: int) -> _Loaded:  # noqa: ARG002, D102
        return _Loaded({}, {})

    def take(self) -> _Loaded:  # noqa: D102
        loaded, names = sys.modules, self._names
        return _Loaded(
            {name: loaded[name] for name in names if name in loaded},
            {name: lock for name, lock in list(_LOCKS.items()) if name in names},
        )

    def put(self, state: _Loaded) -> None:  # noqa: D102
        names = self._names
        sys.modules.update(state.modules)
        # Fast path: mostly all ranks have the same modules, and import none.
        if len(state.modules) != len(names):
            for name in names:
                if name not in state.modules:
                    sys.modules.pop(name, None)
        for name in [name for name in list(_LOCKS) if name in names]:
            _LOCKS.pop(name, None)
        _LOCKS.update(state.locks)


def _prefixes(folders: Sequence[str]) -> tuple[str, ...]:
    """Returns how paths below some folders begin."""
    return tuple(os.path.join(os.path.realpath(folder), "") for folder in folders if folder)


def _file_of(module: ModuleType | None) -> str | None:
    spec = getattr(module, "__spec__", None)  # `sys.modules` may hold anything
    return _places(spec)[0] if isinstance(spec, ModuleSpec) and _places(spec) else None


def _places(spec: ModuleSpec) -> list[str]:
    """Returns the file of a module, or the folders of a package without one. Empty for a built-in module."""
    if spec.origin is not None:
        return [spec.origin] if spec.has_location else []
    return list(spec.submodule_search_locations or ())


class _Finder:
    """Finder that hands over to the others, and notes local modules."""

    def __init__(self, modules: LocalModules) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the specification that the other finders find. None if they find none."""
        for finder in list(sys.meta_path):
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                return self._as_local(spec)
        return None

    def _as_local(self, spec: ModuleSpec) -> ModuleSpec:
        if any(self._modules.is_local(spec.name, place) for place in _places(spec)):
            self._modules.note(spec.name)
            if type(spec.loader) is SourceFileLoader:  # a loader of another kind has a way of its own
                spec.loader = CodeOnce(spec.loader.name, spec.loader.path, self._modules.codes)
        return spec


class CodeOnce(SourceFileLoader):
    """Loader of a source file that is compiled once for all ranks."""

    def __init__(self, name: str, path: str, codes: dict[str, CodeType]) -> None:
        super().__init__(name, path)
        self._codes = codes

    def get_code(self, fullname: str) -> CodeType | None:
        """Returns the code of the module."""
        code = self._codes.get(self.path)
        if code is None:
            found = super().get_code(fullname)
            if found is None:
                return None
            code = self._codes[self.path] = found
        return code
