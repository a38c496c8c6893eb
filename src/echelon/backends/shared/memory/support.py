"""Check that this system supports shared memory between ranks."""

from __future__ import annotations

import os
import platform
import sys

STRONG_MEMORY_ORDER = ("x86_64", "AMD64")
"""Processors that keep the order of stores and that of loads. Counters stored after their data rely on it."""


def obstacle() -> str:
    """Returns why ranks of this system cannot share memory. "" if they can."""
    if sys.platform != "linux":
        return f"it needs Linux (memfd, futex, abstract Unix sockets), and this is {sys.platform}"
    # Python has no memory barriers to ask for, so a weaker order such as ARM's is refused, not worked around.
    machine = platform.machine()
    if machine not in STRONG_MEMORY_ORDER:
        return f"it relies on the memory order of x86-64, and this is {machine}"
    # The futex sleeps on the low 32 bits of a 64-bit word, which only little-endian has at the word's address.
    if sys.byteorder != "little" or sys.maxsize < 1 << 32:
        return "it needs a 64-bit Python"
    try:
        os.close(os.memfd_create("echelon-probe"))
    except OSError as error:
        return f"this system makes no memfd: {error.strerror}"
    return ""
