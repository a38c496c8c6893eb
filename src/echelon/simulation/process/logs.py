"""State of `logging`, of which each simulated rank has its own: the root logger and the loggers that ranks make."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from echelon.simulation.process.state import State


class _Logs(NamedTuple):
    handlers: list[logging.Handler]
    filters: list[Any]
    level: int
    disabled: int
    """Level up to which all loggers are disabled."""
    loggers: dict[str, Any]


class Logs(State):
    """Root logger, and loggers by name. Loggers from before the simulation are shared."""

    def first(self, rank: int) -> _Logs:  # noqa: ARG002, D102
        outside = self.take()
        return outside._replace(
            handlers=list(outside.handlers), filters=list(outside.filters), loggers=dict(outside.loggers)
        )

    def take(self) -> _Logs:  # noqa: D102
        root, manager = logging.root, logging.root.manager
        return _Logs(root.handlers, root.filters, root.level, manager.disable, manager.loggerDict)

    def put(self, state: _Logs) -> None:  # noqa: D102
        root, manager = logging.root, logging.root.manager
        has_changed = (root.level, manager.disable) != (state.level, state.disabled)
        root.handlers, root.filters, root.level = state.handlers, state.filters, state.level
        manager.disable, manager.loggerDict = state.disabled, state.loggers
        if has_changed:
            # Each logger remembers for which levels it is enabled. `setLevel` would forget that in the same way.
            manager._clear_cache()  # type: ignore[attr-defined]

    def finish(self, states: Sequence[_Logs]) -> None:
        """Keeps the loggers of installed packages that were imported meanwhile, since the packages stay."""
        kept = logging.root.manager.loggerDict
        for state in states:
            for name, logger in state.loggers.items():
                package = name.partition(".")[0]
                if name not in kept and package != "__main__" and package in sys.modules:
                    kept[name] = logger
