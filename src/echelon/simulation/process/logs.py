"""State of `logging`, of which each simulated rank has its own: the root logger, and the loggers by name.

Strategy. Ranks share loggers from before the simulation, since modules hold them. From its first change on, what such a
logger has is exchanged between ranks. To see a change, methods of `logging.Logger` are replaced meanwhile.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from echelon.replacements import Replacement, replaced
from echelon.simulation.process.state import State

_CHANGES = ("addHandler", "removeHandler", "addFilter", "removeFilter", "__setattr__")
"""Methods that change a logger."""


class _Logs(NamedTuple):
    handlers: list[logging.Handler]
    filters: list[Any]
    level: int
    disabled: int
    """Level up to which all loggers are disabled."""
    loggers: dict[str, Any]
    changed: dict[logging.Logger, dict[str, Any]]
    """Attributes of loggers from before the simulation that a rank has changed, by logger."""


class Logs(State):
    """Root logger, and loggers by name."""

    def __init__(self) -> None:
        self._shared = {each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)}
        self._outside: dict[logging.Logger, dict[str, Any]] = {}
        """Attributes of loggers before their first change."""
        self._replaced: ExitStack | None = None

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def change(logger: logging.Logger, *args: Any, **kwargs: Any) -> Any:
            if logger in self._shared and logger not in self._outside:
                self._outside[logger] = _copy(vars(logger))
            return original(logger, *args, **kwargs)

        return change

    def first(self, rank: int) -> _Logs:  # noqa: ARG002, D102
        if self._replaced is None:
            self._replaced = ExitStack()
            self._replaced.enter_context(replaced(Replacement(logging.Logger, name, self._noting) for name in _CHANGES))
        outside = self.take()
        return outside._replace(
            handlers=list(outside.handlers), filters=list(outside.filters), loggers=dict(outside.loggers), changed={}
        )

    def take(self) -> _Logs:  # noqa: D102
        root, manager = logging.root, logging.root.manager
        changed = {logger: dict(vars(logger)) for logger in self._outside}
        return _Logs(root.handlers, root.filters, root.level, manager.disable, manager.loggerDict, changed)

    def put(self, state: _Logs) -> None:  # noqa: D102
        root, manager = logging.root, logging.root.manager
        has_changed = (root.level, manager.disable) != (state.level, state.disabled)
        root.handlers, root.filters, root.level = state.handlers, state.filters, state.level
        manager.disable, manager.loggerDict = state.disabled, state.loggers
        for logger, outside in self._outside.items():
            present = vars(logger)
            before = present["level"]
            present.update(state.changed.get(logger) or _copy(outside))
            has_changed |= before != present["level"]
        if has_changed:
            # Each logger remembers for which levels it is enabled. `setLevel` would forget that in the same way.
            manager._clear_cache()  # type: ignore[attr-defined]

    def finish(self, states: Sequence[_Logs]) -> None:
        """Keeps the loggers of installed packages that were imported meanwhile, since the packages stay."""
        if self._replaced is not None:
            self._replaced.close()
        kept = logging.root.manager.loggerDict
        for state in states:
            for name, logger in state.loggers.items():
                package = name.partition(".")[0]
                if name not in kept and package != "__main__" and package in sys.modules:
                    kept[name] = logger


def _copy(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns attributes of a logger, with lists that may be changed."""
    return {name: list(value) if isinstance(value, list) else value for name, value in attributes.items()}
