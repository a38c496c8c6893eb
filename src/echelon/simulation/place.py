"""Where in the user's program a thread is."""

from __future__ import annotations

import linecache
import sys
from types import FrameType

from echelon.launch.report import is_foreign


def calling_place() -> str:
    """Returns the innermost line of the user's own code that led here; empty if there is none."""
    return _place_of(sys._getframe(1))


def place_of_thread(ident: int | None) -> str:
    """Returns the innermost line of the user's own code that a thread is in; empty if there is none."""
    return "" if ident is None else _place_of(sys._current_frames().get(ident))


def _place_of(frame: FrameType | None) -> str:
    while frame is not None:
        path = frame.f_code.co_filename
        if not is_foreign(path):
            line = linecache.getline(path, frame.f_lineno).strip()
            return f"{path}:{frame.f_lineno}" + (f": {line}" if line else "")
        frame = frame.f_back
    return ""
