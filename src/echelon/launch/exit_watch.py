"""Wrapper of `sys.exit` that knows the exit status of this process while it can still tell its peers.

Python forgets the SystemExit before the functions of `atexit` run, and `sys.excepthook` never sees it. So the wrapper
keeps the argument of the last `sys.exit`. A program may catch that SystemExit and go on. The outermost frame
distinguishes the two cases: its last instruction is a return unless an exception has ended it.

`raise SystemExit(3)` without `sys.exit` is not detected. Such a rank leaves like one that closes its group.
"""

from __future__ import annotations

import dis
import sys
import threading
from types import FrameType
from typing import NoReturn


class ExitWatch:
    """Replacement of `sys.exit`. One per process, and for good: other code may hold a reference to it."""

    def __init__(self) -> None:
        self._exit = sys.exit
        self._frame = _outermost_frame()
        self._code: object = None

    def __call__(self, status: object = None, /) -> NoReturn:
        """Raises SystemExit, as `sys.exit` does."""
        if threading.current_thread() is threading.main_thread():  # in another thread it ends that thread only
            self._code = status
        self._exit(status)  # type: ignore[arg-type]

    def code(self) -> object:
        """Returns the argument of the `sys.exit` that ends the program. None if the program ends in another way."""
        return self._code if _was_unwound(self._frame) else None


def watch_exit() -> ExitWatch:
    """Installs the wrapper of `sys.exit` if there is none yet. Returns the installed one."""
    current: object = sys.exit
    if isinstance(current, ExitWatch):
        return current
    watch = ExitWatch()
    sys.exit = watch
    return watch


def _outermost_frame() -> FrameType | None:
    """Returns the main thread's outermost frame. None if there is no such frame."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _was_unwound(frame: FrameType | None) -> bool:
    if frame is None:
        return False
    # By prefix: CPython 3.12 added RETURN_CONST beside RETURN_VALUE.
    return not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
