"""Where in the user's program something was called: file and line of the user's own code, not of a library's."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
from types import CodeType, FrameType
from typing import TypeAlias

Place: TypeAlias = tuple[CodeType, int]
"""A code object and the number of an instruction in it: what a line is found from when somebody asks for it."""

_FOREIGN = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    sysconfig.get_path("purelib") + os.sep,
    "<",
)
"""Where a line is not the user's own: this package, the standard library, installed packages, frozen modules."""


@functools.cache
def is_own(path: str) -> bool:
    """Says whether a source file is this package's."""
    return path.startswith(_FOREIGN[0])


@functools.cache
def is_foreign(path: str) -> bool:
    """Says whether a source file is this package's, the standard library's or an installed one, not the user's own."""
    return path.startswith(_FOREIGN)


def calling_place(depth: int = 1) -> Place | None:
    """Returns the innermost place in the user's own code that led here; None if there is none.

    Args:
        depth: how many calls up to begin; what is passed over is known to be no user's.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        if not is_foreign(code.co_filename):
            return code, frame.f_lasti
        frame = frame.f_back
    return None


def place_of_thread(ident: int | None) -> Place | None:
    """Returns the innermost place in the user's own code that a thread is in; None if there is none."""
    frame = None if ident is None else sys._current_frames().get(ident)
    while frame is not None and is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lasti)


def line_of(place: Place | None) -> str:
    """Returns "file:line" of a place, the file as the program names it; empty for None."""
    if place is None:
        return ""
    code, instruction = place
    line = next((line for start, end, line in code.co_lines() if start <= instruction < end), None)
    return f"{code.co_filename}:{line or code.co_firstlineno}"


def source_of(place: Place | None) -> str:
    """Returns "file:line: the text of that line"; empty for None."""
    where = line_of(place)
    path, _, number = where.rpartition(":")
    text = linecache.getline(path, int(number)).strip() if where else ""
    return f"{where}: {text}" if text else where
