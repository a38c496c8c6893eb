"""Claim of a folder by one job, and the end of the job before it.

Strategy. Rank 0 of a job holds the lock of `.lock` from its first save on. A process that writes for a rank holds the
lock of its record, `.step-00000100.<run>.writers/rank-00003`, and may outlive the rank. So a job that has the folder's
lock waits for the locks of all records, for a minute. Then it ends the writers of its own host. After that nobody but
the job writes into the folder.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
from collections.abc import Sequence

from echelon.checkpoint.files.commit import bring_back, clear, is_records, prepare, remove_step, set_aside
from echelon.checkpoint.files.folder import Folder, failed_to
from echelon.checkpoint.files.fs import FileSystem
from echelon.checkpoint.files.lock import FileLock, holder_of, is_alive, is_held, wait_until, who_holds
from echelon.checkpoint.files.priority import restore
from echelon.errors import CheckpointError, FileError

PATIENCE = 60.0
"""Seconds in which the writers of a job that has ended may commit."""
_LOCK = ".lock"


def claim(fs: FileSystem, folder: str, patience: float = PATIENCE) -> FileLock:
    """Makes the folder if need be, takes its lock, and waits for writers of earlier jobs. The caller closes the lock.

    Raises:
        CheckpointError: another job saves into the folder.
        FileError: the file system has no locks.
        OSError: the folder cannot be made or written to.
    """
    prepare(fs, folder)
    lock = fs.lock(f"{folder}/{_LOCK}")
    # Children of a rank that was killed may hold its lock until they notice.
    is_free = lock.try_take() or (is_alive(who_holds(lock.path)) is False and wait_until(lock.try_take, patience))
    if not is_free:
        whose = who_holds(lock.path)
        is_own = whose.get("pid") == os.getpid() and is_alive(whose)
        if is_own:
            # An error that ended a function may be in a cycle with its frames, and so keeps a store that nobody has.
            gc.collect()
            is_free = lock.try_take()
    if not is_free:
        lock.close()
        if is_own:
            raise CheckpointError(f"another store of this process saves into {folder}: close it, or use that one")
        raise CheckpointError(f"{holder_of(lock.path)} saves into {folder}: stop it, or use another folder")
    try:
        settle(fs, folder, patience)
        # Only now: a writer could have committed one of the drafts meanwhile.
        clear(fs, folder)
    except BaseException:
        lock.close()
        raise
    return lock


def remove(folder: Folder, steps: Sequence[int]) -> None:
    """Removes checkpoints of a folder into which no job saves. Nothing is removed if one of them is not there.

    Raises:
        CheckpointError: there is no such step, another job saves into the folder, or a step has a file of others.
        FileError: the folder cannot be used, or a step cannot be removed.
    """
    run = os.urandom(8).hex()
    try:
        lock = claim(folder.fs, folder.path)
    except FileError:  # also an OSError
        raise
    except OSError as error:
        raise failed_to("use", folder.path, error) from None
    try:
        for step in steps:
            folder.check_named(step)
        for step in steps:
            remove_step(folder.fs, folder.path, step, run)
    finally:
        lock.close()


def settle_before_reading(fs: FileSystem, folder: str) -> None:
    """Waits for writers of a job that has ended, so that the newest checkpoint is there. None of a job that runs.

    Raises:
        CheckpointError: a writer of another host does not end.
        OSError: the folder cannot be read.
    """
    if not fs.is_folder(folder) or not (_records(fs, folder) or set_aside(fs, folder)):
        return
    try:
        lock = fs.lock(f"{folder}/{_LOCK}")
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return  # a job that may only read is not the next start of one that saves
        raise
    try:
        if lock.try_take():
            settle(fs, folder, PATIENCE)
            bring_back(fs, folder)
    finally:
        lock.close()


def settle(fs: FileSystem, folder: str, patience: float) -> None:
    """Waits until no process writes into a folder whose lock this job holds.

    Raises:
        CheckpointError: a writer does not end, and is not of this host or is a rank.
        OSError: the folder cannot be read.
    """

    def busy() -> list[str]:
        return [path for path in _records(fs, folder) if is_held(path)]

    # A writer goes last until somebody waits for it, as this job does now.
    for value in map(who_holds, busy()):
        if value.get("writes") and is_alive(value):
            restore(value["pid"])
    if wait_until(lambda: not busy(), patience):
        return
    for path in busy():
        _end(path)
    if not wait_until(lambda: not busy(), patience):
        path = busy()[0]
        raise CheckpointError(f"{holder_of(path)} of an earlier job still writes into {folder}: end it")


def _records(fs: FileSystem, folder: str) -> list[str]:
    folders = [f"{folder}/{name}" for name in fs.list_folder(folder) if is_records(name)]
    found = []
    for each in folders:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # removed meanwhile; not ours
            found += [f"{each}/{name}" for name in fs.list_folder(each)]
    return found


def _end(path: str) -> None:
    """Kills the writer that a record names."""
    value = who_holds(path)
    if not value.get("writes") or not is_alive(value):
        return
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(value["pid"])
        try:
            # Once more: the number could have been used again before it was opened.
            if is_alive(value):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)
