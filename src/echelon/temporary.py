"""Temporary folder of a process, which a later process removes if the first one was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from echelon.errors import LaunchError

_ABANDONED = 60.0
"""Seconds after which a folder without a lock has lost its owner. An owner locks it at once."""


def temporary_place() -> str:
    """Returns the folder of this host's temporary files.

    Raises:
        LaunchError: none can be written to.
    """
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise _refusal(error) from None


@contextmanager
def temporary_folder(prefix: str) -> Iterator[str]:
    """Makes a folder, and removes it at the end. Removes older ones of this prefix whose owners were killed.

    Raises:
        LaunchError: no folder can be made.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise _refusal(error) from None
    with made as path:
        # Closed by the kernel if this process is killed, and the lock with it.
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            place = os.path.dirname(path)
            for name in os.listdir(place):
                if name.startswith(prefix):
                    _remove_if_abandoned(os.path.join(place, name))
            yield path
        finally:
            os.close(folder)


def _remove_if_abandoned(path: str) -> None:
    with suppress(OSError):  # another user's, or locked by its owner
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            about = os.fstat(folder)
            if about.st_uid == os.geteuid() and time.time() - about.st_mtime > _ABANDONED:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(folder)


def _refusal(error: OSError) -> LaunchError:
    return LaunchError(
        f"no temporary folder can be written to ({error.strerror}): make room, or set TMPDIR to another folder"
    )
