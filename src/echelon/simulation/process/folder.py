"""Working folder of each simulated rank."""

from __future__ import annotations

import os
from contextlib import suppress

from echelon.simulation.process.state import State


class WorkingFolder(State):
    """Working folder. Threads that are no ranks see that of the rank whose program runs."""

    def __init__(self) -> None:
        self._outside = self.take()

    def first(self, rank: int) -> str:  # noqa: ARG002, D102
        return self._outside

    def take(self) -> str:  # noqa: D102
        try:
            return os.getcwd()
        except FileNotFoundError:  # it was removed
            return ""

    def put(self, state: str) -> None:  # noqa: D102
        if state and state != self.take():
            with suppress(FileNotFoundError):
                os.chdir(state)
