"""Check that this system supports shared memory between ranks."""

from __future__ import annotations

import os
import sys

from echelon import _native


def obstacle() -> str:
    """Returns why ranks of this system cannot share memory. "" if they can."""
    if sys.platform != "linux":
        return f"it needs Linux (memfd, futex, abstract Unix sockets), and this is {sys.platform}"
    if _native.OBSTACLE:
        return _native.OBSTACLE
    try:
        os.close(os.memfd_create("echelon-probe"))
    except OSError as error:
        return f"this system makes no memfd: {error.strerror}"
    return ""
