"""Operators of torch.library that simulated ranks define: torch keeps them once per process, so the first rank's count.

A second definition is an error of torch, or frees the first one, so that another rank would call into the void.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import dropwhile
from typing import Any, TypeAlias

import torch
import torch.library
from torch.library import Library

from echelon._torch_private.tensors import destroy_library
from echelon.call_site import is_foreign, outwards
from echelon.replacements import Replacement, calling

Rank: TypeAlias = Callable[[], int | None]
"""Returns the rank that the calling thread is. None in other threads, and in a child process."""

_BETWEEN = (
    os.path.dirname(__file__),
    torch.library.__file__,
    os.path.join(os.path.dirname(torch.__file__), "_library"),
    functools.__file__,  # functions of torch that accept arguments of several types
)
"""Beginnings of files between the code that defines an operator and the functions here."""


class Operators:
    """Operators that the ranks of a simulation define."""

    def __init__(self, rank_here: Rank, has_own_modules: bool) -> None:
        """Takes a function that returns the calling rank, and whether each rank has modules of its own."""
        self._rank_here = rank_here
        self._has_own_modules = has_own_modules
        self._ranks: defaultdict[tuple[str, ...], set[int | None]] = defaultdict(set)
        """Ranks that have made a definition."""
        self._custom: dict[str, Any] = {}
        """Operators defined by `custom_op`, by name."""
        self._libraries: list[Library] = []
        """Libraries of the ranks. A rank may drop its own before another rank has called the operators."""

    def replacements(self) -> list[Replacement]:
        """Returns the functions of torch that act for the calling rank."""
        return [
            Replacement(torch.library, "custom_op", calling(self._custom_op)),
            Replacement(Library, "__init__", calling(self._make)),
            Replacement(Library, "define", calling(self._define)),
            Replacement(Library, "impl", calling(self._implement)),
        ]

    def forget(self) -> None:
        """Removes the ranks' operators from torch. Operators of shared modules stay."""
        for library in self._libraries:
            destroy_library(library)
        self._libraries.clear()
        self._custom.clear()

    def _is_made(self, *definition: str) -> bool:
        """Whether another rank has made a definition that the calling rank makes for the first time."""
        ranks, rank = self._ranks[definition], self._rank_here()
        is_made = bool(ranks) and rank not in ranks
        ranks.add(rank)
        return is_made

    def _custom_op(self, original: Callable[..., Any], name: str, fn: Any = None, /, **options: Any) -> Any:
        def define(function: Any) -> Any:
            if name not in self._custom:
                self._custom[name] = original(name, function, **options)
            return self._custom[name]

        return define if fn is None else define(fn)

    def _make(
        self, original: Callable[..., None], library: Library, ns: str, kind: str, dispatch_key: str = ""
    ) -> None:
        # torch admits one DEF of a namespace, and any number of FRAGMENTs.
        kind = "FRAGMENT" if kind == "DEF" and self._is_made("library", ns) else kind
        original(library, ns, kind, dispatch_key)
        if self._is_for_simulation():
            self._libraries.append(library)

    def _define(self, original: Callable[..., str], library: Library, schema: str, *args: Any, **options: Any) -> str:
        name = schema.split("(")[0].strip()
        if self._is_made("operator", library.ns, name):
            return name
        return original(library, schema, *args, **options)

    def _implement(
        self,
        original: Callable[..., None],
        library: Library,
        op_name: Any,
        fn: Any,
        dispatch_key: str = "",
        **options: Any,
    ) -> None:
        if not self._is_made("implementation", library.ns, str(op_name), dispatch_key or library.dispatch_key):
            original(library, op_name, fn, dispatch_key, **options)

    def _is_for_simulation(self) -> bool:
        """Whether the calling code makes a library that is of no use after the simulation."""
        callers = (each.f_code for each in outwards(sys._getframe(1)))
        codes = list(dropwhile(lambda code: code.co_filename.startswith(_BETWEEN), callers))
        if not codes or is_foreign(codes[0].co_filename):
            return False  # of an installed package, which stays
        return self._has_own_modules or all(code.co_name != "<module>" for code in codes)
