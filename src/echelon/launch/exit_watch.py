"""Watch over `sys.exit`: with which status this process ends, known while it still has time to tell its peers.

Python forgets the SystemExit before the functions of `atexit` run, and `sys.excepthook` never sees it. So the argument
of the last `sys.exit` is kept. A program may catch that SystemExit and go on. The outermost frame tells the two cases
apart: its last instruction is a return unless an exception has ended it.

`raise SystemExit(3)` without `sys.exit` is not seen. Such a rank leaves like one that closes its group.
"""

from __future__ import annotations

import dis
import sys
import threading
from types import FrameType
from typing import NoReturn


class ExitWatch:
    """Stands in for `sys.exit`. One for a process, because it cannot be taken away while others may hold it."""

    def __init__(self) -> None:
        self._exit = sys.exit
        self._frame = _outermost_frame()
        self._code: object = None

    def __call__(self, status: object = None, /) -> NoReturn:
        """Raises SystemExit, as `sys.exit` does."""
        if threading.current_thread() is threading.main_thread():  # in others it ends the thread alone
            self._code = status
        self._exit(status)  # type: ignore[arg-type]

    def code(self) -> object:
        """Returns what the program that ends now has given to `sys.exit`; None if it ends in another way."""
        return self._code if _was_unwound(self._frame) else None


def watch_exit() -> ExitWatch:
    """Has calls of `sys.exit` seen from now on, if they are not yet, and returns what sees them."""
    current: object = sys.exit
    if isinstance(current, ExitWatch):
        return current
    watch = ExitWatch()
    sys.exit = watch
    return watch


def _outermost_frame() -> FrameType | None:
    """Returns the frame in which the program of the main thread began; None if it cannot be known."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _was_unwound(frame: FrameType | None) -> bool:
    if frame is None:
        return False
    return not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
