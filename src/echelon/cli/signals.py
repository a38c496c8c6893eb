"""SIGTERM as an error, so that a command that is ended can say how far it has come."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


def signal_of(error: KeyboardInterrupt) -> signal.Signals:
    """Returns the signal that has raised an error inside of `ending_by_sigterm`."""
    return signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT


@contextmanager
def ending_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM raises `Terminated` in the main thread. No effect in other threads, which get no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_: int, __: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
