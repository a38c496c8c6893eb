"""Wait of one rank until a word in shared memory reaches a level: spin, then yield, then sleep on a futex.

`native/waiting.c` does it, one sleep a call. This module says how long it spins and how often it yields.
"""

from __future__ import annotations

import ctypes

from echelon._native import SPIN, Waiter
from echelon.cores import num_cores

_YIELDS = 100
# With 4 ranks on 2 cores, 10 sent half of the calls to sleep, and 100 were no faster.
_YIELDS_WHEN_CROWDED = 30
_FEWEST_WITHOUT_YIELDS = 16


class SpinThenSleep:
    """Adaptive wait of one rank, shared by all of its groups."""

    def __init__(self, num_local_ranks: int) -> None:
        """Compares `num_local_ranks` with the number of cores that this process may use."""
        roomy = num_local_ranks <= num_cores()
        self.is_oversubscribed = not roomy
        """Whether the host has fewer cores than ranks, so they take turns."""
        # Spinning on a shared core only delays the peer that is to write the word.
        self._state = Waiter(
            spin=SPIN if roomy else 0,
            yields=_YIELDS if roomy else _YIELDS_WHEN_CROWDED,
            next_without_yields=_FEWEST_WITHOUT_YIELDS,
        )
        self.address = ctypes.addressof(self._state)
        """Of its state in this process, for the native library."""
