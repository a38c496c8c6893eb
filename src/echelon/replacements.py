"""Attributes of modules and classes that are replaced for a while, as functions of torch while ranks are simulated.

Each is written as a `Replacement(owner, name, make)`: a search for `Replacement(` finds all that the package replaces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NamedTuple

_MISSING: Any = object()


class Replacement(NamedTuple):
    """Attribute of a module or a class, and the function that makes another value from its present one."""

    owner: Any
    name: str
    make: Callable[[Any], Any]
    may_be_missing: bool = False
    """Whether the attribute need not exist. `make` gets None then."""


def calling(function: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """Returns a `make` by which `function` is called instead, with the original as its first argument.

    The new value has no `self`: to replace a method by it, call it from a function.
    """
    return partial(partial, function)


@contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Inside, attributes have other values. They are replaced in order, and restored in the reverse order.

    Raises:
        AttributeError: an attribute does not exist, though it has to.
    """
    before: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, make, may_be_missing in replacements:
            present = getattr(owner, name, None) if may_be_missing else getattr(owner, name)
            # Of the owner itself: one that it has inherited is inherited again, and a static method stays one.
            own = vars(owner).get(name, _MISSING)
            setattr(owner, name, make(present))
            before.append((owner, name, own))
        yield
    finally:
        for owner, name, own in reversed(before):
            if own is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


@contextmanager
def replaced_in(name: str, replacements: Callable[[ModuleType], Iterable[Replacement]]) -> Iterator[None]:
    """Inside, attributes of a library's module have other values, from its import on if that comes later.

    Args:
        name: the module, such as "transformers.utils".
        replacements: returns the replacements in the module, which gets it as soon as it has run.
    """
    with ExitStack() as stack:

        def enter(module: ModuleType) -> None:
            stack.enter_context(replaced(replacements(module)))

        if (present := sys.modules.get(name)) is not None:
            enter(present)
        finder = _Awaiting(name, enter)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)


class _Awaiting:
    """Finder of one module, which calls a function with it when it has been imported."""

    def __init__(self, name: str, imported: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._imported = imported

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the specification of the awaited module. None for others, which other finders find."""
        spec = PathFinder.find_spec(name, path, target) if name == self._name else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_call(module: ModuleType) -> None:
                run(module)
                self._imported(module)

            vars(spec.loader)["exec_module"] = run_and_call
        return spec
