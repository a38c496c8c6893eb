"""Calls of files by a recorded program, apart from calls that the recording makes itself.

Threads that neither belong to a recorded rank nor were started by one use real files.
"""

from __future__ import annotations

import functools
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


def with_new(
    original: Callable[..., Any], function: Callable[..., Any], *options: Any
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns a function and its replacement by another one, which gets the options first; see `in_place_of`."""
    return original, in_writers(function, *options)(original)


def in_writers(function: Callable[..., Any], *options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns the `make` of a `Replacement` by which programs call `function`, which gets the options first."""
    return functools.partial(in_place_of, function=functools.partial(function, *options), here=writer)


# Positional arguments, here and below: a program may give the same names, as to `Store.save`.
def skip(
    name: str, result: Callable[[], Any], recording: Recording, _: Callable[..., Any], /, *__: Any, **___: Any
) -> Any:
    """Notes a call that writes under a name, in place of the call. Returns a result of its own."""
    recording.log.skip(name)
    return result()


def nothing() -> None:
    """Result of a function that returns nothing."""


def inherit(recording: Recording, original: Callable[[threading.Thread], None], thread: threading.Thread) -> None:
    """Starts a thread, which belongs to the program that starts it."""
    setattr(thread, _STARTED_BY, recording)
    original(thread)
