"""Attributes of modules and classes that are replaced for a while, as functions of torch while ranks are simulated.

Each is written as a `Replacement(owner, name, make)`: a search for `Replacement(` finds all that the package replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
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
