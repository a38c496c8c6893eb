"""Locks of files between processes, which the kernel releases when their holder ends.

A lock belongs to an open file. A process that inherits the file holds it, too. So a rank hands its record to the
process that writes for it, and closes its own. A forked child closes the locks that it inherits: a data loader's
worker must not hold the lock of a rank that was killed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from echelon.errors import FileError

_TICK = 0.02
"""Seconds between two looks at a lock that has a time limit."""


class FileLock:
    """Exclusive lock of a file that says who holds it. One process at a time can hold it."""

    def __init__(self, path: str) -> None:
        """Opens the file. The lock is not taken yet."""
        self.path = path
        self.fileno = -1  # `__del__` also runs after an open that failed, as on a read-only disk
        self.fileno = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _locks.add(self)

    def try_take(self) -> bool:
        """Takes the lock if nobody else holds it, and writes this process's name into the file. False if it is held.

        Raises:
            FileError: the file system has no locks.
            OSError: the file cannot be written.
        """
        if not _flock(self.fileno, fcntl.LOCK_EX | fcntl.LOCK_NB, self.path):
            return False
        note(self.fileno, name_of(os.getpid()))
        return True

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Releases the lock. A second call does nothing."""
        # By default `os.close`, which the module may have lost when the interpreter ends.
        file, self.fileno = self.fileno, -1
        if file >= 0:
            close(file)

    def __del__(self) -> None:
        self.close()


def name_of(pid: int) -> dict[str, Any]:
    """Returns a process of this host as JSON-like data."""
    return {"pid": pid, "host": socket.gethostname(), "started": started_at(pid)}


def note(file: int, value: dict[str, Any]) -> None:
    """Replaces the content of an open file by JSON."""
    data = json.dumps(value).encode()
    os.ftruncate(file, 0)
    os.pwrite(file, data, 0)


def noted(file: int) -> dict[str, Any]:
    """Returns the JSON in an open file. Empty if there is none."""
    try:
        value = json.loads(os.pread(file, os.fstat(file).st_size, 0))
    except ValueError:  # empty, or half of it is written
        return {}
    return value if isinstance(value, dict) else {}


def holder_of(path: str) -> str:
    """Returns the process that a lock's file names, as text."""
    value = who_holds(path)
    if "pid" not in value:
        return "another process"
    return f"process {value['pid']} on {value.get('host')}"


@contextmanager
def _opened(path: str) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def is_held(path: str) -> bool:
    """Whether a process holds the lock of a file. False if there is no such file.

    Raises:
        OSError: the file cannot be opened.
    """
    try:
        with _opened(path) as file:
            # Shared, so that two processes that look at once do not take each other for the holder.
            return not _flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB, path)
    except FileNotFoundError:
        return False


def wait_until(test: Callable[[], bool], seconds: float) -> bool:
    """Waits until a test succeeds, and returns whether it did in time."""
    deadline = time.monotonic() + seconds
    while not test():
        if time.monotonic() > deadline:
            return False
        time.sleep(_TICK)
    return True


def wait_for_end(path: str) -> dict[str, Any]:
    """Waits until nobody holds the lock of a file, and returns its content.

    Raises:
        OSError: there is no such file, or it cannot be opened.
    """
    with _opened(path) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        return noted(file)


def is_alive(value: dict[str, Any]) -> bool | None:
    """Whether the process that a lock's file names is alive. None if it is one of another host, or unknown."""
    if value.get("host") != socket.gethostname() or not isinstance(value.get("pid"), int):
        return None
    return started_at(value["pid"]) == value.get("started")


def started_at(pid: int) -> int:
    """Returns the kernel's time at which a process began. 0 if there is no such process, or it has ended.

    With it a process number that was used again is not mistaken for the first process.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name of the program comes before, and may have spaces and parentheses.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0
    # A zombie holds no lock any more, however long its parent does not wait for it.
    return 0 if fields[0] in "ZX" else int(fields[19])


def who_holds(path: str) -> dict[str, Any]:
    """Returns the content of a lock's file. Empty if there is none."""
    try:
        with _opened(path) as file:
            return noted(file)
    except OSError:
        return {}


def _flock(file: int, how: int, path: str) -> bool:
    """Takes a lock of an open file. False if another one holds it."""
    try:
        # Not lockf: its locks belong to processes, so they are not inherited, and any close of the file frees them.
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            return False
        raise FileError(f"cannot lock {path}: {error.strerror}; use a file system with locks (flock)") from None
    return True


# Weak, so that it keeps no lock alive.
_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_all_in_child)
