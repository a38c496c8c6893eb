"""Lets the operations of one group pass one at a time, in the order of their numbers, whatever threads they come in."""

from __future__ import annotations

import threading
from collections.abc import Callable

_LOOK_SECONDS = 0.02


class Turnstile:
    """Operation 1 passes first. An operation that fails lets the next one pass as well."""

    def __init__(self) -> None:
        self._next = 1
        self._num_waiting = 0
        self._changed = threading.Condition()

    def is_open_to(self, number: int) -> bool:
        """Says whether an operation can pass without `enter`: all before it have left."""
        return self._next == number

    def enter(self, number: int, look_around: Callable[[], None]) -> None:
        """Returns when all operations before `number` have left.

        Args:
            number: of the operation.
            look_around: called every 20 ms; an exception ends the wait.
        """
        with self._changed:
            self._num_waiting += 1
            try:
                while self._next < number:
                    if not self._changed.wait(_LOOK_SECONDS):
                        look_around()
            finally:
                self._num_waiting -= 1

    def leave(self, number: int) -> None:
        """Lets the operation after `number` pass."""
        self._next = number + 1
        if self._num_waiting:
            with self._changed:
                self._changed.notify_all()
