"""Call sites: file and line of the user's own code, not of a library's."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
from types import CodeType, FrameType
from typing import TypeAlias

Place: TypeAlias = tuple[CodeType, int]
"""Code object and index of an instruction in it. The line is computed on demand, since that is slower."""

_FOREIGN = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    sysconfig.get_path("purelib") + os.sep,
    "<",
)
"""Path prefixes of foreign code: this package, the standard library, installed packages, frozen modules."""
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Folders of installed packages, which may also lie in another environment than this one."""


# Both are cached, because they are asked for each frame of each operation.
@functools.cache
def is_own(path: str) -> bool:
    """Whether a source file belongs to this package."""
    return path.startswith(_FOREIGN[0])


@functools.cache
def is_foreign(path: str) -> bool:
    """Whether a source file belongs to this package, the standard library or an installed package."""
    return path.startswith(_FOREIGN) or any(folder in path for folder in _PACKAGES)


def calling_place(depth: int = 1) -> Place | None:
    """Returns the innermost call site in the user's code that led here. None if there is none.

    Args:
        depth: number of frames to skip, all known to be this package's.
    """
    # Not `inspect.stack`, which reads source files.
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        if not is_foreign(code.co_filename):
            return code, frame.f_lasti
        frame = frame.f_back
    return None


def place_of_thread(ident: int | None) -> Place | None:
    """Returns the innermost call site in the user's code of a running thread. None if there is none."""
    frame = None if ident is None else sys._current_frames().get(ident)
    while frame is not None and is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lasti)


def line_of(place: Place | None) -> str:
    """Returns "file:line" of a call site, the file as the program names it. Empty for None."""
    if place is None:
        return ""
    code, instruction = place
    # A generated instruction has no line of its own. Then the line of the function has to do.
    line = next((line for start, end, line in code.co_lines() if start <= instruction < end), None)
    return f"{code.co_filename}:{line or code.co_firstlineno}"


def source_of(place: Place | None) -> str:
    """Returns "file:line: source text". Empty for None."""
    where = line_of(place)
    path, _, number = where.rpartition(":")
    text = linecache.getline(path, int(number)).strip() if where else ""
    return f"{where}: {text}" if text else where
