"""Start of the process that writes in the background, and the memory that it shares with its rank."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint.files.folder import SIZE_LIMIT
from echelon.checkpoint.files.lock import FileLock, name_of, note, noted
from echelon.checkpoint.files.priority import restore
from echelon.errors import FileError

_LOOK = 0.2
"""Seconds between two looks at a writer that is waited for."""


class SharedBuffer:
    """Memory for one copy of a rank's part, kept from one save to the next."""

    def __init__(self) -> None:
        self.fileno = -1
        self._memory: mmap.mmap | None = None

    def tensor(self, size: int) -> Tensor:
        """Returns the first `size` bytes. The memory is made anew if it is too small.

        Raises:
            FileError: there is not enough memory.
        """
        if self._memory is None or len(self._memory) < size:
            self.close()
            self.fileno = os.memfd_create("echelon-checkpoint", os.MFD_CLOEXEC)
            try:
                # Now, since a page that is missing later is a SIGBUS.
                os.posix_fallocate(self.fileno, 0, size)
                self._memory = mmap.mmap(self.fileno, size)
            except OSError as error:
                self.close()
                advice = SIZE_LIMIT if error.errno == errno.EFBIG else "save with wait=True"
                raise FileError(f"no shared memory for {size:,} bytes: {error.strerror}; {advice}") from None
        return torch.frombuffer(self._memory, dtype=torch.uint8)[:size]

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Frees the memory. A process that has inherited it keeps it."""
        # By default `os.close`, which the module may have lost when the interpreter ends.
        file, self.fileno = self.fileno, -1
        self._memory = None  # unmapped with the last tensor that was made of it
        if file >= 0:
            close(file)

    def __del__(self) -> None:
        self.close()


class BackgroundWriter:
    """Process that writes one file. It goes on when this process ends."""

    def __init__(self, memory: int, record: FileLock, job: dict[str, Any]) -> None:
        """Starts it. The record's lock becomes that of the process.

        Raises:
            OSError: no process can be started.
        """
        self._job = os.memfd_create("echelon-checkpoint-job", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._job)
        note(self._job, job)
        files = (memory, record.fileno, self._job)
        # Not "-m": the writer finds the package where this process did. -I and -S: no module of the user's is imported.
        root = str(Path(__file__).parents[3])
        code = (
            f"import sys; sys.path.insert(0, {root!r}); from echelon.checkpoint.ranks.writer import main; main{files!r}"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            stdin=subprocess.PIPE,
            # A launcher that reads its ranks' output would wait for the end of the writers.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=files,
            cwd="/",
            start_new_session=True,  # signals for the job's process group do not end it
        )
        weakref.finalize(self, _let_go, self._process)
        note(record.fileno, name_of(self._process.pid) | {"writes": True})
        # The lock stays held: it belongs to the open file, which the process has inherited.
        record.close()
        # It begins now: its notes come after this one. A byte, since a forked child may keep the pipe open.
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:  # it may have died
            pipe.write(b".")

    def wait(self) -> dict[str, Any]:
        """Waits for the process and returns its outcome: {"ok": True}, or an error and its kind."""
        status = self._process.poll()
        while status is None:
            restore(self._process.pid)  # each time: it may have been lowered after the last one
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(_LOOK)
        outcome = noted(self._job)
        if "ok" in outcome or "error" in outcome:
            return outcome
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return {"error": f"its writer process {how}", "kind": "checkpoint"}


def _let_go(process: subprocess.Popen[bytes]) -> None:
    # It outlives this process on purpose, and Popen would warn of that.
    if process.poll() is None:
        process.returncode = 0
