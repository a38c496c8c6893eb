"""Lines on long work for a file, a pipe or the caller of a library: its name and the time so far.

Strategy. A thread waits for the end of the work, and writes a line whenever it waited for too long. It calls nothing of
the work, so neither waits for the other.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

_FIRST = 2.0
"""Seconds until the library writes its first line."""


@contextmanager
def lines_of_time(what: str, say: Callable[[str], None], first: float) -> Iterator[None]:
    """Writes lines inside the with block, each after twice as long as the one before.

    Args:
        what: the work, such as "searching schedules".
        say: writes a line.
        first: seconds until the first line.
    """
    ended = threading.Event()

    def tell() -> None:
        begin = time.monotonic()
        pause = first
        while not ended.wait(pause):
            say(f"echelon: {what}, {time.monotonic() - begin:.0f} s so far")
            pause *= 2

    thread = threading.Thread(target=tell, name="echelon-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def told_by_rank_0(what: str) -> AbstractContextManager[None]:
    """Returns a context inside of which rank 0, or a process without a rank, writes lines on its work to stderr.

    Args:
        what: the work, such as "tracing the model".
    """
    stream = sys.stderr  # of now: simulated ranks have others, and the thread is none of them
    if stream is None or os.environ.get("RANK", "0") != "0":
        return nullcontext()

    def say(line: str) -> None:
        with suppress(OSError, ValueError):  # a stream without a reader, or closed: the work goes on
            print(line, file=stream, flush=True)

    return lines_of_time(what, say, _FIRST)
