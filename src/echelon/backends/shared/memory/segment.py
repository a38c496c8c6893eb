"""Shared memory of one host: an unnamed file that all local ranks have open and map in parts.

The file has 2**50 bytes per rank and takes memory only where something was written. It can neither shrink nor grow, so
no peer can remove pages that another has mapped (SIGBUS). Each rank allocates from its own range and never reuses an
address: freed parts leave holes. The file ends with the last process that has it open or mapped, however that process
ends.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from dataclasses import dataclass

import torch

from echelon._native import Words, core
from echelon.backends.modes import normal_mode
from echelon.backends.shared.memory.mapping import File, Mapping
from echelon.errors import ConnectError, UnsupportedOp

# The ranges of 4,096 ranks, the most on one host, have to stay below 2**63 bytes, the most that a file can have.
RANGE_BYTES = 1 << 50
"""Of each rank."""
# Sealed in size for good: F_SEAL_SEAL keeps peers from adding seals, such as one against writing.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Mapped part of the segment, valid while anything refers to it."""

    memory: Mapping
    data: torch.Tensor
    """The whole part, as uint8."""

    @property
    def address(self) -> int:
        """Address of its first byte in this process."""
        return self.data.data_ptr()


def words_of(window: Window) -> Words:
    """Returns a window as 64-bit numbers, which keep it mapped."""
    words: Words = core.words(window.address, len(window.memory) // 8, window.memory)
    return words


class Segment:
    """Memory file shared by the ranks of one host."""

    def __init__(self, fd: int, num_ranks: int, number: int) -> None:
        """Takes ownership of the file `fd`.

        Args:
            fd: from `create` on one of the ranks. Closed when the segment and everything mapped from it are gone.
            num_ranks: how many ranks share it.
            number: of this rank among them.

        Raises:
            ConnectError: it is no such file. `fd` is closed then.
        """
        self._file: File | None = File(fd)
        self._size = num_ranks * RANGE_BYTES
        self._next = number * RANGE_BYTES
        self._end = self._next + RANGE_BYTES
        # The file may come from another process: size and seals are checked before anything is mapped.
        try:
            facts = os.fstat(fd)
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except OSError:
            self.close()
            raise ConnectError("the file received as shared memory cannot be sealed: it is no memfd") from None
        if not stat.S_ISREG(facts.st_mode) or not sealed or facts.st_size != self._size:
            self.close()
            raise ConnectError(
                f"expected shared memory of {self._size} bytes with sealed size, got {facts.st_size} bytes"
            )

    @property
    def fd(self) -> int:
        """The file. -1 after `close`."""
        return self._file.fd if self._file is not None else -1

    @classmethod
    def create(cls, num_ranks: int) -> Segment:
        """Creates the file, as number 0 of the ranks that share it.

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
        """Allocates part of this rank's range and returns its offset in the file.

        Raises:
            UnsupportedOp: the range is used up.
        """
        offset, self._next = self._next, self._next + _whole_pages(num_bytes)
        if self._next > self._end:
            raise UnsupportedOp(f"no {num_bytes} bytes are left in this rank's range of the shared memory")
        return offset

    def map(self, offset: int, num_bytes: int) -> Window:
        """Maps a part that one of the ranks has allocated.

        Raises:
            ConnectError: the part is outside the segment.
            UnsupportedOp: the system cannot map it in this process.
        """
        size = _whole_pages(num_bytes)
        # The offset may come from a peer. Beyond the file's end a mapping succeeds, and its first access is a SIGBUS.
        if offset % mmap.PAGESIZE or not 0 <= offset <= self._size - size or size <= 0:
            raise ConnectError(f"bytes {offset} to {offset + size} are outside a shared memory of {self._size} bytes")
        assert self._file is not None, "mapped after close"
        try:
            memory = Mapping.of(self._file, size, offset)
        except OSError as error:
            advice = "raise its limit (ulimit -n)" if error.errno == errno.EMFILE else "free some, or use backend='tcp'"
            raise UnsupportedOp(
                f"{size} bytes of shared memory cannot be mapped: {error.strerror}: {advice}"
            ) from error
        # Outside inference mode: torch refuses to change its tensors later from an ordinary thread.
        with normal_mode():
            return Window(memory, torch.frombuffer(memory, dtype=torch.uint8))

    def close(self) -> None:
        """Drops the file, which stays open while any part is mapped. May be called twice."""
        self._file = None


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
