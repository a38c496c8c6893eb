"""Priority of the processes that write in the background.

The kernel shares processors between sessions before it does so inside of one (CONFIG_SCHED_AUTOGROUP), and a writer is
alone in its own. So its nice value counts for nothing, and that of its session for all: four spinning writers of nice
19 took 3/4 of the time from four spinning trainers, and 1/8 with their sessions at 19.
"""

from __future__ import annotations

import os
import time

_NICE = 10
"""For kernels that share between processes. No user without rights can take it back."""
_SESSION = 19
"""Writers get a 70th of the weight of another session, until somebody waits for them."""
_TURN = 2.0
"""Seconds in which a writer tries to lower its session's priority."""


def lower() -> None:
    """Lets all others go first. Called in the writer, which leads a session. Blocks for 2 s at most."""
    os.nice(_NICE)
    # The kernel lets users without rights change one session in 0.1 s, and the writers of a host begin together.
    deadline = time.monotonic() + _TURN
    while not _set("self", _SESSION) and time.monotonic() < deadline:
        time.sleep(0.02)


def restore(pid: int) -> None:
    """Gives a writer's session the usual priority, since somebody waits for it. May have no effect: call it again."""
    # The kernel asks for rights below 0 alone. The nice value of a process could not be taken back.
    _set(str(pid), 0)


def _set(process: str, nice: int) -> bool:
    """Sets the nice value of a session. False if the kernel asks to try again."""
    try:
        file = os.open(f"/proc/{process}/autogroup", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(file, str(nice).encode())
        finally:
            os.close(file)
    except BlockingIOError:
        return False
    except OSError:  # the process has ended, a kernel without autogroups, or /proc is read-only
        pass
    return True
