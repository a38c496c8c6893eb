"""File system below checkpoints: the few calls that saving and loading need."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from abc import ABC, abstractmethod
from typing import final

from echelon.checkpoint.files.lock import FileLock

ASIDE = ".old"
"""Ends the name under which a folder waits while names are exchanged by renames."""


class Output(ABC):
    """New file that is written from its begin to its end."""

    @abstractmethod
    def write(self, data: memoryview | bytes) -> None:
        """Appends bytes."""

    @abstractmethod
    def sync(self) -> None:
        """Returns when the bytes are on disk."""

    @abstractmethod
    def close(self) -> None:
        """Frees the file. A second call does nothing."""


class Input(ABC):
    """File that is read anywhere."""

    size: int
    """Bytes of the file."""

    @abstractmethod
    def read_into(self, position: int, out: memoryview) -> int:
        """Fills `out` from a position on. Returns the number of bytes, fewer at the end of the file."""

    @abstractmethod
    def prefetch(self, position: int, size: int) -> None:
        """Begins to read bytes that are wanted soon."""

    @abstractmethod
    def close(self) -> None:
        """Frees the file. A second call does nothing."""


class FileSystem(ABC):
    """Interface of file systems. Methods raise OSError. A change of names is on disk after `sync_folder`."""

    @abstractmethod
    def create(self, path: str) -> Output:
        """Opens a new file. Raises FileExistsError if there is one."""

    @abstractmethod
    def open(self, path: str) -> Input:
        """Opens a file to be read. Raises FileNotFoundError if there is none, or it is no ordinary file."""

    @abstractmethod
    def lock(self, path: str) -> FileLock:
        """Opens the lock of a file, which is made. It is not taken yet."""

    @abstractmethod
    def make_folder(self, path: str) -> None:
        """Makes a folder. Raises FileExistsError if there is one."""

    @abstractmethod
    def is_folder(self, path: str) -> bool:
        """Whether a path is a folder and no link to one."""

    @abstractmethod
    def list_folder(self, path: str) -> list[str]:
        """Returns the names in a folder."""

    @abstractmethod
    def sync_folder(self, path: str) -> None:
        """Returns when the names in a folder are on disk."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Gives a folder another name, which no folder with files may have."""

    @abstractmethod
    def exchange(self, one: str, other: str) -> None:
        """Exchanges the names of two folders at once."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Removes a file."""

    @abstractmethod
    def remove_folder(self, path: str) -> None:
        """Removes an empty folder."""


@final
class Disk(FileSystem):
    """File systems of this host."""

    def create(self, path: str) -> Output:
        """Opens a new file."""
        return _DiskOutput(path)

    def open(self, path: str) -> Input:
        """Opens a file to be read."""
        return _DiskInput(path)

    def lock(self, path: str) -> FileLock:
        """Opens the lock of a file."""
        return FileLock(path)

    def make_folder(self, path: str) -> None:
        """Makes a folder."""
        os.mkdir(path)

    def is_folder(self, path: str) -> bool:
        """Whether a path is a folder and no link to one."""
        return os.path.isdir(path) and not os.path.islink(path)

    def list_folder(self, path: str) -> list[str]:
        """Returns the names in a folder."""
        return os.listdir(path)

    def sync_folder(self, path: str) -> None:
        """Returns when the names in a folder are on disk."""
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def rename(self, old: str, new: str) -> None:
        """Gives a folder another name."""
        os.rename(old, new)

    def exchange(self, one: str, other: str) -> None:
        """Exchanges the names of two folders at once; by renames where the file system cannot, as NFS."""
        # The os module has no call that exchanges names.
        call = ctypes.CDLL(None, use_errno=True).renameat2
        here = -100  # AT_FDCWD
        if call(here, os.fsencode(one), here, os.fsencode(other), 2) == 0:  # RENAME_EXCHANGE
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(number, os.strerror(number), one)
        exchange_by_renames(self, one, other)

    def remove(self, path: str) -> None:
        """Removes a file."""
        os.remove(path)

    def remove_folder(self, path: str) -> None:
        """Removes an empty folder."""
        os.rmdir(path)


def exchange_by_renames(fs: FileSystem, one: str, other: str) -> None:
    """Exchanges the names of two folders of one folder. A failure or crash may leave `other` as `one` + ASIDE."""
    folder, aside = one.rpartition("/")[0], one + ASIDE
    # Each is on disk before the next: a crash must not keep a later one alone, which would lose a folder.
    for old, new in ((other, aside), (one, other), (aside, one)):
        fs.rename(old, new)
        fs.sync_folder(folder)


class _DiskOutput(Output):
    """New file, written around the page cache where the memory is aligned.

    A copy into the page cache would cost the trainer a processor, and push its data out.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._set_direct(True)

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data).cast("B")
        while view:
            try:
                view = view[os.write(self._file, view) :]
            except OSError as error:
                # The last block's length, or the memory of a small write, is not aligned.
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._set_direct(False)

    def sync(self) -> None:
        # Direct writes need it, too: for the length of the file, and for the cache of the disk itself.
        os.fsync(self._file)

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _set_direct(self, is_direct: bool) -> None:
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT)
        except OSError:  # a file system without it
            is_direct = False
        self._is_direct = is_direct


class _DiskInput(Input):
    def __init__(self, path: str) -> None:
        # Without O_NONBLOCK, a pipe of that name would block here.
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise FileNotFoundError(errno.ENOENT, "It is no file", path)
        self.size = found.st_size

    def read_into(self, position: int, out: memoryview) -> int:
        done = 0
        # A call may read less than is asked for.
        while done < len(out) and (count := os.preadv(self._file, [out[done:]], position + done)):
            done += count
        return done

    def prefetch(self, position: int, size: int) -> None:
        os.posix_fadvise(self._file, position, size, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
