"""Number of the simulated rank that the calling thread belongs to."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from echelon.simulation.process.state import State


class CallingRank(State):
    """Rank of the calling thread, and the rank whose program runs at the moment."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._process = os.getpid()
        self._installed: int | None = None

    @contextmanager
    def belongs(self, rank: int) -> Iterator[None]:
        """Inside, the calling thread belongs to a rank."""
        self._local.rank = rank
        try:
            yield
        finally:
            del self._local.rank

    def here(self) -> int | None:
        """Returns the rank that is the calling thread. None in other threads, and in a child process of a rank."""
        return getattr(self._local, "rank", None) if os.getpid() == self._process else None

    def nearest(self) -> int | None:
        """Returns the rank of the calling thread. In a thread of no rank, that whose program runs. None without one."""
        rank: int | None = getattr(self._local, "rank", self._installed)
        return rank

    def first(self, rank: int) -> int:  # noqa: D102
        return rank

    def take(self) -> int | None:  # noqa: D102
        return self._installed

    def put(self, state: int | None) -> None:  # noqa: D102
        self._installed = state
