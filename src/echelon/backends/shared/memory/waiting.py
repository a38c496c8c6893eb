"""Wait until a word in shared memory reaches a level: spin, then yield, then sleep on a futex.

Strategy. If each local rank can have a core, the word is read 200 times first, since a peer about to write it does so
within microseconds. Then the core is yielded up to 100 times. Then the rank sets its own `asleep` word and sleeps on
the awaited word (futex). The kernel reads that word once more behind a fence before it puts the thread to sleep. A
writer stores its word, passes a fence, then reads whether a peer sleeps, and wakes it. So either the sleeper sees the
new value or the writer sees the sleeper. The first sleep ends after 20 ms at the latest, later ones after 50 ms; after
each the caller checks for dead peers and revoked groups.

A yield that takes longer than 0.5 ms shows that others need the core. The next 16 waits then skip yielding, and twice
as many, up to 512, if it takes long again.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

# Python has no futex, so the system call is made through libc; x86-64 is the only machine that `support` admits.
_SYSCALL_NUMBER = 202
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_NULL = ctypes.c_void_p(None)
_NUMBER = ctypes.c_long(_SYSCALL_NUMBER)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, value: int, seconds: float) -> None:
    """Sleeps until `wake` is called for the 32 bits at `address`. Returns at once if they already differ from `value`.

    May return early without a reason, and after `seconds` at the latest. Other threads of this process run meanwhile.
    """
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _syscall(
        _NUMBER, ctypes.c_void_p(address), ctypes.c_long(_WAIT), ctypes.c_uint(value), ctypes.byref(limit), _NULL, _NULL
    )


def wake(address: int) -> None:
    """Wakes all threads, in any process, that sleep on the word at `address`."""
    _syscall(
        _NUMBER,
        ctypes.c_void_p(address),
        ctypes.c_long(_WAKE),
        ctypes.c_uint(_EVERYBODY),
        _NULL,
        _NULL,
        ctypes.c_long(0),
    )


# Other numbers of yields, and sleeping at once, were measured with 4 ranks on 2 cores and were no faster.
_SPINS = 200
_YIELDS = 100
_YIELDS_WHEN_CROWDED = 10
_LONG_YIELD_SECONDS = 0.5e-3  # longer: other threads need the core
_FEWEST_WITHOUT_YIELDS, _MOST_WITHOUT_YIELDS = 16, 512
# Upper limits on the time until a waiting rank notices a failure. With them it uses less than 1 % of a core, which a
# test measures.
_NAP_SECONDS, _LONGEST_NAP_SECONDS = 0.02, 0.05

_LOW_BITS = 0xFFFFFFFF


class SpinThenSleep:
    """Adaptive wait of one rank, shared by all of its groups."""

    def __init__(self, num_local_ranks: int) -> None:
        """Compares `num_local_ranks` with the number of cores that this process may use."""
        roomy = num_local_ranks <= len(os.sched_getaffinity(0))
        self.is_oversubscribed = not roomy
        """Whether the host has fewer cores than ranks, so they take turns."""
        # Spinning on a shared core only delays the peer that is to write the word.
        self._spins = range(_SPINS if roomy else 0)
        self._yields = range(_YIELDS if roomy else _YIELDS_WHEN_CROWDED)
        self._waits_without_yields = 0
        self._next_without_yields = _FEWEST_WITHOUT_YIELDS

    def wait(
        self, words: memoryview, index: int, level: int, address: int, asleep: int, check_liveness: Callable[[], None]
    ) -> None:
        """Blocks until `words[index]` is at least `level`.

        Args:
            words: the memory as 64-bit numbers.
            index: of the word that a peer writes.
            level: the value to wait for.
            address: of that word in this process.
            asleep: index of this rank's own word that tells peers it sleeps.
            check_liveness: called at least every 50 ms while asleep; an exception ends the wait.
        """
        # Fast path: no clock, no system call.
        for _ in self._spins:
            if words[index] >= level:
                return
        if self._waits_without_yields:
            self._waits_without_yields -= 1
        else:
            before = time.monotonic()
            for _ in self._yields:
                os.sched_yield()
                now = time.monotonic()
                if words[index] >= level:
                    if now - before <= _LONG_YIELD_SECONDS:
                        self._next_without_yields = _FEWEST_WITHOUT_YIELDS
                    return
                if now - before > _LONG_YIELD_SECONDS:
                    self._waits_without_yields = self._next_without_yields
                    self._next_without_yields = min(2 * self._next_without_yields, _MOST_WITHOUT_YIELDS)
                    break
                before = now
        try:
            # Memory order: set before the word is read again. The writer does the reverse, so one of the two sees the
            # other.
            words[asleep] = 1
            seconds = _NAP_SECONDS
            while (value := words[index]) < level:
                # The kernel compares the low 32 bits with `value`: a store since the read above makes it return at
                # once.
                wait(address, value & _LOW_BITS, seconds)
                seconds = _LONGEST_NAP_SECONDS
                # A tick counts even if the peer died right after it, so liveness is checked only if the word did not
                # change.
                if words[index] < level:
                    check_liveness()
        finally:
            words[asleep] = 0
