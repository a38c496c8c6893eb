"""Precision of computations as each simulated rank has set it: of float32, and the casts of `torch.autocast`."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeAlias

import torch

from echelon._torch_private.modules import precision_of, precisions_set_by
from echelon.replacements import Replacement, calling, replaced
from echelon.simulation.process.operators import Rank
from echelon.simulation.process.state import State

_Values: TypeAlias = dict[tuple[str, str], str]
"""Precisions that a rank has set, by backend and operation, in the order of the calls."""

_ALL = (
    ("generic", "all"),
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "matmul", "conv", "rnn")),
)


class Precisions(State):
    """Precisions, such as `torch.backends.cuda.matmul.fp32_precision`. To be put before states that read one.

    Strategy. torch keeps them once per process and backend. To read all of them takes 20 us, so they are not read at
    each hand-over. torch's function that sets one is replaced, and the rank's own values are noted there. Most programs
    set none.
    """

    def __init__(self) -> None:
        self._values: _Values = {}
        """Precisions that the installed rank has set."""
        self._outside: _Values = {}
        """Values from before the simulation."""
        self._set: Callable[..., None]
        self._replaced: ExitStack | None = None

    def _noting(self, original: Callable[..., None]) -> Callable[..., None]:
        self._set = original
        # All of them now: one that is not set follows that of its backend, which a rank may set first.
        self._outside = {key: precision_of(*key) for key in _ALL}

        def set_precision(backend: str, operation: str, value: str) -> None:
            key = backend, operation
            original(backend, operation, value)
            self._values.pop(key, None)
            self._values[key] = value

        return set_precision

    def first(self, rank: int) -> _Values:  # noqa: ARG002, D102
        if self._replaced is None:
            self._replaced = ExitStack()
            self._replaced.enter_context(replaced(precisions_set_by(self._noting)))
        return {}

    def take(self) -> _Values:  # noqa: D102
        return self._values

    def put(self, state: _Values) -> None:  # noqa: D102
        if state == self._values:
            self._values = state
            return
        before, self._values = self._values, state
        for key in before.keys() - state.keys():
            self._set(*key, self._outside.get(key, "none"))
        for key, value in state.items():
            self._set(*key, value)

    def finish(self, states: Sequence[_Values]) -> None:  # noqa: ARG002, D102
        if self._replaced is None:
            return
        self._replaced.close()
        # Other functions, such as `torch.set_float32_matmul_precision`, set them as well.
        for key, value in self._outside.items():
            if precision_of(*key) != value:
                self._set(*key, value)


class AutocastCache:
    """Cache of `torch.autocast`, which torch keeps once per process: a rank must not drop the casts of another one.

    Strategy. torch drops all casts when a thread leaves its outermost autocast. A second use of a weight is then cast
    again, and its gradient is rounded twice. So the cache is dropped when no rank is inside of autocast any more. Until
    then the old casts of a rank that has left are stale, so it enters autocast without the cache.
    """

    def __init__(self, rank_here: Rank) -> None:
        """Takes a function that returns the calling rank."""
        self._rank_here = rank_here
        self._depths: defaultdict[int | None, int] = defaultdict(int)
        """Number of nested autocasts, by rank."""
        self._is_wanted: dict[int | None, bool] = {}
        """Whether a rank's program wants the cache."""
        self._stale: set[int | None] = set()
        """Ranks whose old casts may still be there."""
        self._set_enabled = torch.set_autocast_cache_enabled

    def replacements(self) -> list[Replacement]:
        """Returns the functions of torch that act for the calling rank."""
        return [
            Replacement(torch, "autocast_increment_nesting", calling(functools.partial(self._nest, 1))),
            Replacement(torch, "autocast_decrement_nesting", calling(functools.partial(self._nest, -1))),
            Replacement(torch, "clear_autocast_cache", calling(self._clear)),
            Replacement(torch, "set_autocast_cache_enabled", lambda _: self._enable),
            Replacement(torch, "is_autocast_cache_enabled", lambda _: self._is_enabled),
        ]

    def _nest(self, change: int, original: Callable[[], int]) -> int:
        self._depths[self._rank_here()] += change
        return original()

    def _clear(self, original: Callable[[], None]) -> None:
        rank = self._rank_here()
        if any(depth > 0 for other, depth in self._depths.items() if other != rank):
            self._stale.add(rank)
            self._set_enabled(False)  # until it enters autocast again
        else:
            original()
            self._stale.clear()

    def _enable(self, wanted: bool) -> None:
        rank = self._rank_here()
        self._is_wanted[rank] = wanted
        self._set_enabled(wanted and rank not in self._stale)

    def _is_enabled(self) -> bool:
        return self._is_wanted.get(self._rank_here(), True)  # in a new thread it is
