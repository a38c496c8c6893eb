"""Calls of files by a recorded program, apart from calls that the recording makes itself.

Threads that neither belong to a recorded rank nor were started by one use real files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from echelon.foresight.record.here import Recording, in_place_of, recording_here

_own = threading.local()
_STARTED_BY = "_started_by_recording"


def writer() -> Recording | None:
    """Returns the recording of the calling thread, or of the one that started it."""
    if getattr(_own, "calls", False):
        return None
    return recording_here() or getattr(threading.current_thread(), _STARTED_BY, None)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Inside, the calling thread uses real files."""
    before = getattr(_own, "calls", False)
    _own.calls = True
    try:
        yield
    finally:
        _own.calls = before


def inheriting(original: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Wraps `Thread.start`: the new thread belongs to the program that starts it."""

    @in_place_of(original, writer)
    def start(recording: Recording, thread: threading.Thread) -> None:
        setattr(thread, _STARTED_BY, recording)
        original(thread)

    return start


def skipping(original: Callable[..., Any], name: str, result: Callable[[], Any] = lambda: None) -> Callable[..., Any]:
    """Wraps a function that writes: the call is skipped and noted under a name, and has a result of its own."""

    @in_place_of(original, writer)
    def skip(recording: Recording, *_: Any, **__: Any) -> Any:
        recording.log.skip(name)
        return result()

    return skip
