"""The memory of one host: a file without a name that all local ranks have open, and map in parts.

The file is 2**57 bytes per rank, and takes memory only where something was written. It can neither shrink nor grow, so
no peer can take pages away from under another (SIGBUS). Each rank gives out parts of its own range, and never one
twice: what is freed leaves a hole. It ends with the last process that has it open or mapped, however that ends.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from dataclasses import dataclass

import torch

from echelon.backends.modes import normal_mode
from echelon.backends.shared.memory.mapping import File, Mapping
from echelon.errors import ConnectError, UnsupportedOp

RANGE_BYTES = 1 << 57
"""Of each rank."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Part of the segment in this process, for as long as anything refers to it."""

    memory: Mapping
    data: torch.Tensor
    """All of it, as uint8."""

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return self.data.data_ptr()


class Segment:
    """A file in memory, shared by the ranks of one host."""

    def __init__(self, fd: int, num_ranks: int, number: int) -> None:
        """Takes over the file `fd`.

        Args:
            fd: from `create` on one of the ranks. It is closed with the segment and all that is mapped of it.
            num_ranks: how many ranks share it.
            number: of this rank among them.

        Raises:
            ConnectError: it is no such file; `fd` is closed.
        """
        self._file: File | None = File(fd)
        self._size = num_ranks * RANGE_BYTES
        self._next = number * RANGE_BYTES
        self._end = self._next + RANGE_BYTES
        try:
            facts = os.fstat(fd)
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except OSError:
            self.close()
            raise ConnectError("what came as shared memory cannot be sealed: it is of another kind") from None
        if not stat.S_ISREG(facts.st_mode) or not sealed or facts.st_size != self._size:
            self.close()
            raise ConnectError(f"shared memory of {facts.st_size} bytes came, not {self._size} that nobody can change")

    @property
    def fd(self) -> int:
        """The file; -1 after `close`."""
        return self._file.fd if self._file is not None else -1

    @classmethod
    def create(cls, num_ranks: int) -> Segment:
        """Makes the file; this is rank number 0 of those that share it.

        Raises:
            OSError: the system does not allow it.
        """
        fd = os.memfd_create("echelon", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_ranks * RANGE_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(fd)
            raise
        return cls(fd, num_ranks, 0)

    def allocate(self, num_bytes: int) -> int:
        """Gives out a part of this rank's range; returns where it begins."""
        offset, self._next = self._next, self._next + _whole_pages(num_bytes)
        if self._next > self._end:
            raise UnsupportedOp(f"no {num_bytes} bytes are left of this rank's range of the shared memory")
        return offset

    def map(self, offset: int, num_bytes: int) -> Window:
        """Maps a part that one of the ranks has given out.

        Raises:
            ConnectError: there is no such part.
            UnsupportedOp: there is no room for it in this process.
        """
        size = _whole_pages(num_bytes)
        if offset % mmap.PAGESIZE or not 0 <= offset <= self._size - size or size <= 0:
            raise ConnectError(f"bytes {offset} to {offset + size} are not in a shared memory of {self._size} bytes")
        assert self._file is not None, "mapped after close"
        try:
            memory = Mapping.of(self._file, size, offset)
        except OSError as error:
            advice = "raise its limit (ulimit -n)" if error.errno == errno.EMFILE else "free some, or use backend='tcp'"
            raise UnsupportedOp(
                f"{size} bytes of shared memory cannot be mapped: {error.strerror}: {advice}"
            ) from error
        with normal_mode():
            return Window(memory, torch.frombuffer(memory, dtype=torch.uint8))

    def close(self) -> None:
        """Lets go of the file, which stays open while anything of it is mapped. May be called twice."""
        self._file = None


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
