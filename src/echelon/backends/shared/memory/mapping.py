"""Mappings of shared memory that become private copies in a forked child.

Strategy. Right after a fork, the child replaces each mapping at its address by a private one of the same file
(MAP_PRIVATE). So its writes reach neither the parent nor another rank. Pages that it has not written still show later
writes to the file. Received tensors must not change so: the parent reuses their memory once it drops them. The forking
thread therefore copies them before the fork, and the child puts the copies in place. All of this runs in the one
forking thread and takes no lock, as a lock held by another thread of the parent would never be released in the child.
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
_MAP_NORESERVE = 0x4000  # absent from Python's mmap; an arena of 1 GiB is mostly empty, so reserve no swap for it
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2


class File:
    """File descriptor that is closed when no segment and no mapping refers to it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    # The default argument keeps os.close reachable at interpreter shutdown, when module globals may be gone.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


class Mapping(mmap.mmap):
    """Mapped part of a file that several processes share."""

    file: File
    """Open while this is mapped: a forked child maps it again, and mmap hides its own descriptor."""
    offset: int
    """Of the part in the file, in bytes."""

    @classmethod
    def of(cls, file: File, size: int, offset: int) -> Mapping:
        """Maps whole pages of a file.

        Raises:
            OSError: the system refuses.
        """
        mapping = cls(file.fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
        mapping.file = file
        mapping.offset = offset
        _mappings.add(mapping)
        return mapping

    def become_private(self) -> bool:
        """Replaces this mapping by a private one of the same part at the same address, in a forked child.

        True if that worked. If the system has no room for it, the memory becomes read-only instead: a write then ends
        the child by SIGSEGV and leaves the parent's tensors alone.
        """
        address, size = address_of(self), len(self)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        # MAP_FIXED could fail with the old mapping gone, so map elsewhere first, then move over the old one.
        made = _libc.mmap(None, size, protection, flags, self.file.fd, self.offset)
        moved = _FAILED
        if made != _FAILED:
            moved = _libc.mremap(made, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, address)
        if moved == _FAILED:
            _libc.mprotect(address, size, mmap.PROT_READ)
        return bool(moved != _FAILED)


class Lender(Protocol):
    """Owner of shared memory that is handed out as tensors for some time."""

    def loans(self) -> Iterable[memoryview]:
        """Returns the memory that is handed out now."""
        ...


class _Copy(NamedTuple):
    """Content of a piece of memory at the time of a fork."""

    address: int
    content: bytes


_mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()
# By id. A WeakSet cannot be iterated while other threads add to it, as they may during a fork; a dict can be copied.
_lenders: dict[int, weakref.ref[Lender]] = {}
# By thread that is about to fork: two threads may fork at once.
_copies: dict[int, list[_Copy]] = {}


def add_lender(lender: Lender) -> None:
    """Has forked children see the loans of `lender` with their content at the time of the fork."""
    key = id(lender)
    _lenders[key] = weakref.ref(lender, lambda _: _lenders.pop(key, None))


def address_of(memory: mmap.mmap | memoryview) -> int:
    """Returns the address at which writable memory begins in this process."""
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
        # Where the private mapping failed, a write would be a SIGSEGV at once, before the child has done anything.
        if not any(copy.address in addresses for addresses in read_only):
            ctypes.memmove(copy.address, copy.content, len(copy.content))
    _copies.clear()
    # All of it is private now, so the child's own children inherit it as any other memory.
    _mappings.clear()
    _lenders.clear()


os.register_at_fork(before=_copy_loans, after_in_parent=_drop_copies, after_in_child=_become_child)
