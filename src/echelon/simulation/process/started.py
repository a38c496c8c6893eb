"""Processes that a program starts, one for each rank: each simulated rank runs the one of its own number.

Strategy. A rank runs its process in its own thread, when the program first waits for one of them, or else at the end.
Only then is their number known. A rank that has begun torch.distributed needs no further processes as ranks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from echelon.call_site import calling_place, source_of
from echelon.errors import UnsupportedOp


class _Started(NamedTuple):
    process: Any
    name: str
    """Name of its function."""
    line: str


class Started:
    """Processes that one rank has started and not run yet."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._waiting: list[_Started] = []

    def start(self, process: Any, function: Callable[..., object]) -> None:
        """Takes a process in place of starting it.

        Raises:
            UnsupportedOp: it cannot be a rank.
        """
        started = _Started(process, getattr(function, "__name__", "a function"), source_of(calling_place()))
        if dist.is_initialized() or any(each.name != started.name for each in self._waiting):
            raise self._refusal(started)
        self._waiting.append(started)
        process._popen = _Ended(self.run)

    def run(self) -> None:
        """Runs the process of this rank, unless it has run.

        Raises:
            UnsupportedOp: there is not one process for each rank.
        """
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        if len(waiting) != self._world_size:
            raise self._refusal(waiting[0], f", but {len(waiting)} for {self._world_size} ranks")
        try:
            waiting[self._rank].process.run()
        except SystemExit as error:
            if error.code:
                raise

    @staticmethod
    def _refusal(started: _Started, numbers: str = "") -> UnsupportedOp:
        return UnsupportedOp(
            f"a process of {started.name} is started at {started.line}{numbers}: simulated ranks are threads of one "
            "process, and another process could not talk to them: start one process for each rank, before "
            "init_process_group, or call the function on each rank"
        )


class _Ended:
    """State of a started process for `multiprocessing`. A question for its end makes its rank run it."""

    returncode = 0

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self.pid = os.getpid()

    def poll(self) -> int:
        """Returns the status, once the process has ended."""
        self._run()
        return 0

    def wait(self, timeout: float | None = None) -> int:  # noqa: ARG002
        """Returns the status, once the process has ended."""
        return self.poll()

    def terminate(self) -> None:
        """Does nothing."""

    kill = close = terminate


def function_of(process: Any) -> Callable[..., object]:
    """Returns the function that a process of `multiprocessing` runs."""
    function = process._target
    while isinstance(function, functools.partial):
        function = function.func
    found: Callable[..., object] = function or type(process).run
    return found
