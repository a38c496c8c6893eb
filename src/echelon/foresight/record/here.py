"""Recording of the calling thread: each recorded rank has one, in the thread that runs its program."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from echelon.foresight.record.log import Log
from echelon.foresight.record.memory import Memory
from echelon.foresight.record.routing import Routing

if TYPE_CHECKING:
    from echelon.foresight.record.placement import Placement
    from echelon.foresight.record.repeats import Repeats


class Recording(NamedTuple):
    """Log, memory and known values of one rank."""

    rank: int
    log: Log
    memory: Memory
    routing: Routing
    placement: Placement | None = None
    """Known devices of the tensors. None: the host has no GPUs."""
    repeats: Repeats | None = None
    """Microbatches that may be repeated. None: all of them run."""


_thread = threading.local()


def recording_here() -> Recording | None:
    """Returns the recording of the calling thread. None in a thread of no recorded rank."""
    found: Recording | None = getattr(_thread, "recording", None)
    return found


@contextmanager
def recorded(recording: Recording) -> Iterator[None]:
    """Inside, the calling thread has this recording."""
    _thread.recording = recording
    try:
        yield
    finally:
        del _thread.recording


def in_place_of(
    original: Callable[..., Any], here: Callable[[], Recording | None] = recording_here
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a function that recorded ranks call in place of another one.

    It gets the recording before the arguments. Threads without a recording call the original.

    Args:
        original: function that is replaced.
        here: returns the recording of the calling thread.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            recording = here()
            return original(*args, **kwargs) if recording is None else function(recording, *args, **kwargs)

        return call

    return decorate
