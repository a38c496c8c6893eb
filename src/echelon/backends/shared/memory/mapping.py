"""Mappings of shared memory, which a forked child has as private copies.

Strategy. Right after a fork, in the child, each mapping is replaced at its address by a private one of the same file
(MAP_PRIVATE), so nothing that the child writes reaches the parent or another rank. Pages that the child has not written
still show later writes to the file. That must not happen to received tensors: their memory serves other messages as
soon as the parent drops them. So the forking thread copies those before the fork, and the child puts the copies in
place. All of it happens in the one thread that forks, and takes no lock that a thread of the parent could have held.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import NamedTuple, Protocol

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value
_MAP_NORESERVE = 0x4000  # not in Python's mmap; an arena of 1 GiB is mostly empty
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2


class File:
    """File descriptor that closes when neither a segment nor a mapping refers to it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


class Mapping(mmap.mmap):
    """Part of a file that several processes map."""

    file: File
    """Open for as long as this is mapped: a forked child maps it again, and mmap's own descriptor is hidden."""
    offset: int
    """Of the part in the file."""

    @classmethod
    def of(cls, file: File, size: int, offset: int) -> Mapping:
        """Maps whole pages of a file.

        Raises:
            OSError: the system cannot.
        """
        mapping = cls(file.fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
        mapping.file = file
        mapping.offset = offset
        _mappings.add(mapping)
        return mapping

    def become_private(self) -> bool:
        """Replaces this by a private mapping of the same part at the same address; for a forked child.

        Returns True if that worked. If the system has no room for it, the memory becomes read-only instead: a write
        then ends the child by SIGSEGV, and does not change the parent's tensors.
        """
        address, size = address_of(self), len(self)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        # MAP_FIXED could fail with the old mapping gone; so the new one is made elsewhere, then moved over the old.
        made = _libc.mmap(None, size, protection, flags, self.file.fd, self.offset)
        moved = _FAILED
        if made != _FAILED:
            moved = _libc.mremap(made, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, address)
        if moved == _FAILED:
            _libc.mprotect(address, size, mmap.PROT_READ)
        return bool(moved != _FAILED)


class Lender(Protocol):
    """Owner of memory that it hands out as tensors for some time."""

    def loans(self) -> Iterable[memoryview]:
        """Returns the memory that is handed out now."""
        ...


class _Copy(NamedTuple):
    """Content of a part of memory at the time of a fork."""

    address: int
    content: bytes


_mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()
_lenders: dict[int, weakref.ref[Lender]] = {}
"""By id. A WeakSet cannot be read while other threads add to it, as they do while one forks; a dict can."""
_copies: dict[int, list[_Copy]] = {}
"""By thread that is about to fork."""


def add_lender(lender: Lender) -> None:
    """Has forked children find in memory that `lender` handed out the content that it had at the fork."""
    key = id(lender)
    _lenders[key] = weakref.ref(lender, lambda _: _lenders.pop(key, None))


def address_of(memory: mmap.mmap | memoryview) -> int:
    """Returns where memory that can be written begins in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _copy_loans() -> None:
    lenders = [lender for reference in tuple(_lenders.values()) if (lender := reference()) is not None]
    loans = [memory for lender in lenders for memory in lender.loans()]
    if loans:
        _copies[get_ident()] = [_Copy(address_of(memory), bytes(memory)) for memory in loans]


def _drop_copies() -> None:
    _copies.pop(get_ident(), None)


def _become_child() -> None:
    shared = [mapping for mapping in list(_mappings) if not mapping.become_private()]
    read_only = [range(address_of(mapping), address_of(mapping) + len(mapping)) for mapping in shared]
    for copy in _copies.get(get_ident(), ()):
        if not any(copy.address in addresses for addresses in read_only):
            ctypes.memmove(copy.address, copy.content, len(copy.content))
    _copies.clear()
    # What this process has now is private: its own children inherit it as any other memory.
    _mappings.clear()
    _lenders.clear()


os.register_at_fork(before=_copy_loans, after_in_parent=_drop_copies, after_in_child=_become_child)
