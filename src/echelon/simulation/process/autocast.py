"""Cache of `torch.autocast`, which torch keeps once per process: a rank must not drop the casts of another one.

Strategy. torch drops all casts when a thread leaves its outermost autocast. A second use of a weight is then cast
again, and its gradient is rounded twice. So the cache is dropped when no rank is inside of autocast any more. Until
then the old casts of a rank that has left are stale, so it enters autocast without the cache.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable

import torch

from echelon.replacements import Replacement, calling
from echelon.simulation.process.operators import Rank


class AutocastCache:
    """Use of the cache by the ranks of a simulation."""

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
