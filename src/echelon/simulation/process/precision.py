"""Precision of float32 that torch keeps once per process and backend, of which each simulated rank has its own.

Strategy. To read all of them takes 20 us, so they are not read at each hand-over. torch's function that sets one is
replaced, and the rank's own values are noted there. Most programs set none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeAlias

from echelon._torch_private.modules import precision_of, precisions_set_by
from echelon.replacements import replaced
from echelon.simulation.process.state import State

_Values: TypeAlias = dict[tuple[str, str], str]
"""Precisions that a rank has set, by backend and operation, in the order of the calls."""


_ALL = (
    ("generic", "all"),
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "matmul", "conv", "rnn")),
)


class Precisions(State):
    """Precisions, such as `torch.backends.cuda.matmul.fp32_precision`. To be put before states that read one."""

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
