"""How a rank waits until a word in shared memory has reached a level.

Strategy. While every local rank can have a core, the word is read some 200 times, because a peer that is about to write
it does so within microseconds. Then the core is given away a number of times. Then the rank says in its own `asleep`
word that it sleeps, and sleeps on the word itself (waiting); the kernel looks at the word once more, behind a fence,
before it lets it sleep. Whoever writes a word looks afterwards, behind a fence, whether a peer sleeps, and wakes it: so
either the sleeper sees the new value or the writer sees that it sleeps. A sleep ends after 20 ms, a later one after 50
ms at the latest, and the caller looks around for what else may have happened: peers that died or gave up.

When giving the core away takes long, others need it: for 16 waits it is not tried, and for twice as many if it then
takes long again.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

# Linux's futex: to sleep until another process says that a word in shared memory has changed.

_SYSCALL_NUMBER = 202
"""Of waiting, on x86-64."""
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


_SPINS = 200
_YIELDS = 100
_YIELDS_WHEN_CROWDED = 10
_LONG_YIELD_SECONDS = 0.5e-3
_FEWEST_WITHOUT_YIELDS, _MOST_WITHOUT_YIELDS = 16, 512
_NAP_SECONDS, _LONGEST_NAP_SECONDS = 0.02, 0.05

_LOW_BITS = 0xFFFFFFFF


class SpinThenSleep:
    """How one rank waits; one for all of its groups."""

    def __init__(self, num_local_ranks: int) -> None:
        """Looks how many cores this process may use; `num_local_ranks` share them."""
        roomy = num_local_ranks <= len(os.sched_getaffinity(0))
        self.is_oversubscribed = not roomy
        """Whether ranks have to take turns on the cores."""
        self._spins = range(_SPINS if roomy else 0)
        self._yields = range(_YIELDS if roomy else _YIELDS_WHEN_CROWDED)
        self._waits_without_yields = 0
        self._next_without_yields = _FEWEST_WITHOUT_YIELDS

    def wait(
        self, words: memoryview, index: int, level: int, address: int, asleep: int, check_liveness: Callable[[], None]
    ) -> None:
        """Returns when `words[index]` is at least `level`.

        Args:
            words: the memory as 64-bit numbers.
            index: the word that a peer writes.
            level: what it is to reach.
            address: where that word is in this process.
            asleep: the index of this rank's own word that says that it sleeps.
            look_around: called at least every 50 ms; an exception ends the wait.
        """
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
            words[asleep] = 1
            seconds = _NAP_SECONDS
            while (value := words[index]) < level:
                wait(address, value & _LOW_BITS, seconds)
                seconds = _LONGEST_NAP_SECONDS
                if words[index] < level:
                    check_liveness()
        finally:
            words[asleep] = 0
