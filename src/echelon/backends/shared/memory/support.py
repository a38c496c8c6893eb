"""Whether ranks can share memory on this system, and if not, why."""

from __future__ import annotations

import os
import platform
import sys

STRONG_MEMORY_ORDER = ("x86_64", "AMD64")
"""Processors on which what one core stores in order, another loads in order. Flags after data need that."""


def obstacle() -> str:
    """Returns why ranks of this system cannot share memory; "" if they can."""
    if sys.platform != "linux":
        return f"it needs Linux (memfd, futex, abstract Unix sockets), and this is {sys.platform}"
    machine = platform.machine()
    if machine not in STRONG_MEMORY_ORDER:
        return f"it relies on the memory order of x86-64, and this is {machine}"
    if sys.byteorder != "little" or sys.maxsize < 1 << 32:
        return "it needs a 64-bit Python"
    try:
        os.close(os.memfd_create("echelon-probe"))
    except OSError as error:
        return f"this system makes no memfd: {error.strerror}"
    return ""
