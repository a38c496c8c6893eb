"""Keeps the threads of a simulation on one core, where handing over from one to the next takes the least time.

Across two cores a hand-over takes about 20 microseconds, on one core 6: nobody has to wake the other core up. It takes
3 if the kernel lets who wakes another go on until it sleeps (SCHED_BATCH); else the one that was woken comes at once,
finds that the interpreter's lock is taken, and sleeps again.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keeps the calling thread, and those that it starts inside, on the core that it is on. Does what the system lets.

    Afterwards the calling thread is as it was before.
    """
    cores = policy = None
    with suppress(OSError, AttributeError):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {_this_core()})
    with suppress(OSError, AttributeError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            policy = os.SCHED_OTHER
    try:
        yield
    finally:
        with suppress(OSError, AttributeError):
            if policy is not None:
                os.sched_setscheduler(0, policy, os.sched_param(0))
        with suppress(OSError, AttributeError):
            if cores is not None:
                os.sched_setaffinity(0, cores)


def _this_core() -> int:
    """Returns the number of the core that the calling thread is on.

    Raises:
        OSError, AttributeError: the system cannot tell.
    """
    number = int(_c_library().sched_getcpu())
    if number < 0:
        raise OSError("sched_getcpu failed")
    return number


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
