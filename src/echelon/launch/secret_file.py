"""Secret of a job whose ranks are all on one host, in a file that only this user can read.

Strategy. The first rank makes the file, and the others find it. It is written under a temporary name and then linked to
its own, which fails if that exists already. So no rank reads half a file, all ranks get the same secret, and none waits
for another. A file that a killed job left behind is as secret as a new one.

The folder is removed with its last file. A rank that still has it open finds nothing in it and can make nothing there,
so it opens the folder anew. Ranks cannot end up with two files in two folders.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress

from echelon.errors import LaunchError
from echelon.temporary import temporary_place

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SECRET_BYTES = 32
_TEXT_BYTES = 2 * _SECRET_BYTES


class SecretFile:
    """Secret file of one job. `close`, or the end of a with block, leaves the file; `remove` deletes it."""

    def __init__(self, job: str, environ: Mapping[str, str] = os.environ) -> None:
        """Opens the folder: XDG_RUNTIME_DIR if only this user can enter it, else one in the temporary folder.

        Args:
            job: name of the job, the same on all of its ranks, and different from any other job's.
            environ: environment variables, for XDG_RUNTIME_DIR.

        Raises:
            LaunchError: there is no folder that only this user can enter.
        """
        # The hash keeps names apart that look the same once unsafe characters are replaced and the rest is cut.
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", job)[:64]
        self._name = f"echelon-{readable}-{hashlib.sha256(job.encode()).hexdigest()[:16]}"
        self._environ = environ
        self._folder = _open_folder(environ)

    def secret(self) -> bytes:
        """Returns the secret in the file. Makes the file if there is none. Never waits for another rank.

        Raises:
            LaunchError: the file cannot be read or made, is not private to this user, or holds no secret.
        """
        while True:
            with suppress(FileNotFoundError):
                return self._read()
            try:
                self._make()
            except FileExistsError:  # another rank was first: read its secret
                pass
            except FileNotFoundError:  # another job has removed the folder since this rank opened it
                os.close(self._folder)
                self._folder = _open_folder(self._environ)

    def remove(self) -> None:
        """Removes the file if it exists, and the folder too, if it is empty and in the temporary folder."""
        with suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._folder)
        path = _temporary_folder()
        with suppress(OSError):  # another job has a file there, or has removed it
            if os.path.samestat(os.fstat(self._folder), os.lstat(path)):
                os.rmdir(path)

    def close(self) -> None:
        """Closes the folder."""
        os.close(self._folder)

    def __enter__(self) -> SecretFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> bytes:
        # Owner, mode and kind are checked on the open descriptor, so the file cannot be replaced in between.
        # O_NOFOLLOW refuses a link, O_NONBLOCK keeps a FIFO of that name from blocking.
        try:
            file = os.open(self._name, _OPEN_FILE, dir_fd=self._folder)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise self._refusal(f"cannot be read ({error.strerror})") from None
        with os.fdopen(file, "rb") as opened:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or not _is_private(status):
                raise self._refusal("is not a file that only this user can read")
            text = opened.read(_TEXT_BYTES + 1)
        if re.fullmatch(rb"[0-9a-f]{%d}" % _TEXT_BYTES, text) is None:
            raise self._refusal("has no secret in it")
        return text

    def _make(self) -> None:
        draft = f"{self._name}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            with os.fdopen(os.open(draft, _NEW_FILE, 0o600, dir_fd=self._folder), "w") as opened:
                opened.write(secrets.token_hex(_SECRET_BYTES))
            # A link, not a rename: os.rename would replace the secret of a rank that was first.
            os.link(draft, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder, follow_symlinks=False)
        except (FileExistsError, FileNotFoundError):
            raise
        except OSError as error:
            raise self._refusal(f"cannot be made ({error.strerror})") from None
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=self._folder)

    def _refusal(self, problem: str) -> LaunchError:
        path = os.path.join(os.readlink(f"/proc/self/fd/{self._folder}"), self._name)
        return LaunchError(f"{path} {problem}: remove it, or set ECHELON_SECRET to the same random text on every rank")


def _open_folder(environ: Mapping[str, str]) -> int:
    """Opens a folder that only this user can enter. Processes with the same variables open the same one."""
    given = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(given):
        with suppress(OSError):  # it is gone, for instance, after the session that it belonged to has ended
            folder = os.open(given, _OPEN_FOLDER)
            if _is_private(os.fstat(folder)):
                return folder
            os.close(folder)
    path = _temporary_folder()
    try:
        folder = _made_and_opened(path)
    except OSError as error:
        raise _folder_refusal(path, f"cannot be opened as a folder ({error.strerror})") from None
    if not _is_private(os.fstat(folder)):
        os.close(folder)
        raise _folder_refusal(path, "is not a folder that only this user can enter")
    return folder


def _temporary_folder() -> str:
    return os.path.join(temporary_place(), f"echelon-{os.geteuid()}")


def _made_and_opened(path: str) -> int:
    """Opens a folder and makes it first if it is missing. Retries, since other jobs remove it while it is empty.

    Raises:
        OSError: it cannot be made or opened.
    """
    while True:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        with suppress(FileNotFoundError):  # removed in between
            return os.open(path, _OPEN_FOLDER)


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _folder_refusal(path: str, problem: str) -> LaunchError:
    return LaunchError(
        f"{path} {problem}: remove it, or set XDG_RUNTIME_DIR or ECHELON_SECRET to the same on every rank"
    )
