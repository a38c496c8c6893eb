"""Compiled code of torch.compile, of which each simulated rank has its own.

Strategy. torch keeps compiled code with the code object that it was made from, and ranks share code objects. A call of
`dist.get_rank()` becomes a constant of the compiled code, without a guard. So every rank would compute with the number
of the first one. torch takes compiled code again for the same compiler only, so each rank gets one of its own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from echelon._torch_private.modules import OfRank, backend_of, compiled_by
from echelon.replacements import Replacement, replaced

_COMPILER = "torch._dynamo"
"""Module of torch's compiler. The first call of torch.compile imports it, which takes a second."""

_backends: dict[int, list[tuple[object, object]]] = {}
"""Compilers by rank: that of the program, and an object in its place. Kept, so that another simulation does not compile
the same code again."""


@contextmanager
def compiled_for_ranks(rank_here: Callable[[], int | None], world_size: int) -> Iterator[None]:
    """Inside, code that a rank has compiled runs on this rank alone.

    Args:
        rank_here: Returns the rank of the calling thread. None in other threads.
        world_size: Number of ranks.
    """
    is_installed = False
    with ExitStack() as stack:

        def install() -> None:
            nonlocal is_installed
            if not is_installed:
                is_installed = True
                stack.enter_context(replaced(compiled_by(functools.partial(_for_ranks, rank_here, world_size))))

        def installing(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def compile_first(*args: Any, **kwargs: Any) -> Any:
                install()
                return original(*args, **kwargs)

            return compile_first

        if _COMPILER in sys.modules:
            install()
        else:
            stack.enter_context(replaced([Replacement(torch, "compile", installing)]))
        yield


def _for_ranks(
    rank_here: Callable[[], int | None], world_size: int, original: Callable[..., Any]
) -> Callable[..., Any]:
    def choose(compiler: Any) -> Any:
        chosen, rank = original(compiler), rank_here()
        if not chosen or rank is None or isinstance(chosen, OfRank):
            return chosen
        return OfRank(chosen, _backend(rank, backend_of(chosen)), world_size)

    return choose


def _backend(rank: int, backend: object) -> object:
    """Returns the object that stands for a compiler on a rank: the same for an equal compiler."""
    known = _backends.setdefault(rank, [])
    for each, own in known:
        # torch makes a new compiler for each call of torch.compile, which equals others with its options.
        if each is backend or (type(each) is type(backend) and each == backend):
            return own
    known.append((backend, own := object()))
    return own
