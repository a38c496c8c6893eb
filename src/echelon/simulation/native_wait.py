"""Native waits of threads: whether a thread of this process sleeps for good, and in which C function.

Linux says in /proc where a thread sleeps. A futex is the one place where a thread waits for another thread: locks,
conditions and futures of C++ end there. A wait for a file, a child or a time ends by itself, or by the outside.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import struct
from typing import NamedTuple

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
"""Number of the system call."""

_LOCK = "PyThread_acquire_lock_timed"
"""Function of Python that waits for a lock."""
_WORDS_OF_LOCK = 32
"""Number of words on the stack among which its return address is if it waits: 17 with glibc 2.36."""
_WORDS = 1024
"""Words of a thread's stack that are searched for the function which waits."""

_UNTOLD = ("libc", "ld-", "libpthread", "libstdc++", "libgcc", "[")
"""Beginnings of files whose functions wait for whoever calls them."""
_PYTHON = ("libpython", "python")
"""Beginnings of files with the interpreter."""


class NativeWait(NamedTuple):
    """Wait of a thread in the kernel."""

    channel: str
    """Function of the kernel, such as "futex_do_wait". Empty if the kernel hides it."""
    is_futex: bool
    """Whether it waits for a thread."""
    is_endless: bool
    """Whether it has no timeout, as far as the kernel tells."""
    stack: int = 0
    """Address of the top of the thread's stack. 0: unknown."""


def native_wait(thread: int) -> NativeWait | None:
    """Returns the wait of a thread, given by its native number. None if it runs, or the system does not tell."""
    # The kernel writes 0 for a thread that runs, and for all if it hides the channel.
    channel, call = _read(thread, "wchan").strip("\0\n 0"), _read(thread, "syscall").split()
    if len(call) == 9:  # number, six arguments, top of the stack, instruction
        # The fourth argument of futex is the address of a timeout.
        return NativeWait(channel, int(call[0]) == _FUTEX, int(call[4], 16) == 0, int(call[7], 16))
    return NativeWait(channel, channel.startswith("futex"), True) if channel else None


def threads() -> list[int]:
    """Returns the native numbers of all threads of this process."""
    try:
        return [int(number) for number in os.listdir("/proc/self/task")]
    except OSError:
        return []


def has_children() -> bool:
    """Whether this process has child processes."""
    return any(_read(thread, "children").strip() for thread in threads())


def started_at(thread: int) -> float:
    """Returns the time at which a thread was started, on the clock CLOCK_BOOTTIME. inf if the system does not tell."""
    fields = _read(thread, "stat").rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK") if len(fields) > 19 else math.inf


def num_waits(thread: int) -> int:
    """Returns the number of waits that a thread has begun. -1 if the system does not tell."""
    for line in _read(thread, "status").splitlines():
        if line.startswith("voluntary_ctxt_switches:"):
            return int(line.split()[1])
    return -1


def _read(thread: int, name: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/{name}") as file:
            return file.read()
    except (OSError, ValueError):  # a thread that has ended, or a system without /proc
        return ""


class _Symbol(ctypes.Structure):
    """Result of dladdr."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def waiting_code(wait: NativeWait) -> str:
    """Returns the C function in which a thread waits, such as "c10d::HashStore::wait in libtorch_cpu.so".

    Only the library if its functions have no names. Empty if nothing is known, or Python itself waits. A guess: the
    first addresses on the stack that lie in the code of a library, leaving out the C library and Python.
    """
    if not wait.stack:
        return ""
    code, first = _code(), ""
    try:
        # By a file, so that a wrong address is an error, not the end of the process.
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            found = os.pread(memory.fileno(), 8 * _WORDS, wait.stack)
            words = [word for (word,) in struct.iter_unpack("<Q", found[: len(found) // 8 * 8])]
            # Between the frames of the C library lie addresses of functions that have returned, such as torch's.
            if any(_function_at(word) == _LOCK for word in words[:_WORDS_OF_LOCK]):
                return ""
            for word in words:
                library = next((name for start, end, name in code if start <= word < end), "")
                if library.startswith(_PYTHON):  # further up are its callers
                    return first
                if not library or not _follows_call(os.pread(memory.fileno(), 7, word - 7)):
                    continue
                first = first or library
                if function := _function_at(word):
                    return f"{function} in {library}"
    except (OSError, OverflowError):
        return ""
    return first


def _follows_call(before: bytes) -> bool:
    """Whether the 7 bytes before an address end with a call, so that the address can be one to return to.

    Tells addresses to return to from pointers to functions. True for any bytes on other processors than x86-64.
    """
    if platform.machine() != "x86_64" or len(before) < 7:
        return True
    # Call of a fixed address; by a register; by memory at a register, and with an offset of 8 or 32 bits.
    return before[-5] == 0xE8 or any(
        before[-size] == 0xFF and before[1 - size] & 0x38 == 0x10 for size in (2, 3, 4, 6, 7)
    )


def _code() -> list[tuple[int, int, str]]:
    """Returns the first and last address of each library's code, and the library's name."""
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)  # addresses, rights, offset, device, inode, path
            name = os.path.basename(fields[5]) if len(fields) == 6 else ""
            if "x" in fields[1] and name and not name.startswith(_UNTOLD):
                start, end = fields[0].split("-")
                found.append((int(start, 16), int(end, 16), name))
    return found


def _function_at(address: int) -> str:
    """Returns the name of the function with an instruction at `address`. Empty if it has no name."""
    symbol = _Symbol()
    if not ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(symbol)) or not symbol.name:
        return ""
    name = _demangled(symbol.name)
    return "" if name.startswith(("typeinfo", "vtable", "VTT")) else name


def _demangled(name: bytes) -> str:
    """Returns a function's name as in its source, without the types of its arguments."""
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return os.fsdecode(name)
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = demangle(name, None, None, ctypes.byref(status))
    if status.value or not text:
        return os.fsdecode(name)
    try:
        readable = os.fsdecode(ctypes.string_at(text))
    finally:
        # The demangler gives memory of malloc.
        ctypes.CDLL(None).free(ctypes.c_void_p(text))
    return readable.replace("(anonymous namespace)::", "").partition("(")[0]
