"""Linux's futex: to sleep until another process says that a word in shared memory has changed."""

from __future__ import annotations

import ctypes

_SYSCALL_NUMBER = 202
"""Of futex, on x86-64."""
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_NULL = ctypes.c_void_p(None)
_NUMBER = ctypes.c_long(_SYSCALL_NUMBER)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, value: int, seconds: float) -> None:
    """Sleeps until `wake` is called for the 32 bits at `address`, but not if they differ from `value` already.

    May return early for no reason, and does so after `seconds`. Other threads of this process run meanwhile.
    """
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _syscall(
        _NUMBER, ctypes.c_void_p(address), ctypes.c_long(_WAIT), ctypes.c_uint(value), ctypes.byref(limit), _NULL, _NULL
    )


def wake(address: int) -> None:
    """Wakes all, in any process, that sleep on the word at `address`."""
    _syscall(
        _NUMBER,
        ctypes.c_void_p(address),
        ctypes.c_long(_WAKE),
        ctypes.c_uint(_EVERYBODY),
        _NULL,
        _NULL,
        ctypes.c_long(0),
    )
