"""Native library: words in memory that ranks share, waits, small collectives, reductions, copies.

`native/` in the project has its C sources, and an installation compiles them into this folder. Its functions become
builtins without an import of an extension module: `PyCFunction_NewEx` makes them from the library's table. So one file
serves all versions of Python. Addresses are numbers here, so the callers answer for the memory behind them.

Functions of the board return a code: see `Code`. They never raise for a reason of the protocol, and sleep for 20 ms at
most. If there is no library, `OBSTACLE` says why, and only `copy` and `combine` may be called.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

VARIABLE = "ECHELON_NATIVE"
"""Environment variable that turns the library off if it is "0"."""
SPIN = 30_000
"""Nanoseconds for which a rank looks for a word of another one before anything else. The interpreter's lock is held
meanwhile: whoever frees it may wait a switch interval to get it back. The Python that follows takes about as long."""
# The same as in native/module.c: raised with each change of a function's arguments or of a struct.
_VERSION = 9
# In a folder of its own: beside modules it would look like one.
_PATH = Path(__file__).with_name("library") / f"core-{platform.machine()}.so"


class Words(Protocol):
    """64-bit numbers in shared memory. A load acquires, a store releases."""

    def __getitem__(self, index: int) -> int:
        """Loads a word."""
        ...

    def __setitem__(self, index: int, value: int) -> None:
        """Stores a word."""
        ...


class Code:
    """Results of the functions of the board and of messages, which have their own words at their declarations."""

    DONE = 0
    WAITING = 1
    """A sleep has ended: look around, then call `go_on`."""
    DIFFERS = 2
    """Peer `peer` of the board has announced another operation, or has withdrawn its announcement."""
    NOT_SO = 3
    """The tensor, or the reduction, is not for this function. Nothing was done."""
    CHANGED = 4
    """All ranks have met, and a rank has other blocks than before. Nothing was read."""
    TO_COMBINE = 5
    """The next step of the program is a reduction that the library does not have."""


class Waiter(ctypes.Structure):
    """`struct waiter`: how one rank waits."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("spin", "yields", "waits_without_yields", "next_without_yields")
    )
    if TYPE_CHECKING:
        spin: int
        yields: int
        waits_without_yields: int
        next_without_yields: int


class Board(ctypes.Structure):
    """`struct board`: synchronisation of one group, as one rank sees it."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("region", "rank_bytes", "tick", "asleep")),
        *((name, ctypes.c_uint64 * 2) for name in ("mark", "result_mark", "note", "result", "small")),
        *((name, ctypes.c_uint64) for name in ("rank", "num_ranks", "waiter", "result_bytes")),
        # From here on the library writes.
        *((name, ctypes.c_uint64) for name in ("ticks", "announced", "number", "mark_now", "text", "text_bytes")),
        ("written", ctypes.c_uint64 * 2),
        *((name, ctypes.c_uint64) for name in ("waits_for_words", "peer", "level", "num_naps")),
        *((name, ctypes.c_uint64) for name in ("act", "own", "target", "num_bytes", "count")),
        *((name, ctypes.c_uint64) for name in ("source", "is_published", "combine", "plan", "program", "step")),
        *((name, ctypes.c_uint64) for name in ("itemsize", "has_set_out", "is_brief", "is_free", "begun")),
    )
    if TYPE_CHECKING:
        region: int
        rank_bytes: int
        tick: int
        asleep: int
        mark: ctypes.Array[ctypes.c_uint64]
        result_mark: ctypes.Array[ctypes.c_uint64]
        note: ctypes.Array[ctypes.c_uint64]
        result: ctypes.Array[ctypes.c_uint64]
        small: ctypes.Array[ctypes.c_uint64]
        rank: int
        num_ranks: int
        waiter: int
        result_bytes: int
        ticks: int
        announced: int
        number: int
        mark_now: int
        written: ctypes.Array[ctypes.c_uint64]
        peer: int
        level: int
        step: int


class Act:
    """Ways in which a small collective runs: `enum act`."""

    MEETS_ONLY, REDUCES, RECEIVES, EXCHANGES = range(4)


class Target:
    """Places of a reduction's result: `enum target`."""

    NONE, IN_PLACE, INTO_OUT = range(3)


class Calls(ctypes.Structure):
    """`struct calls`: numbers of a group's calls on one rank. Python's code moves them too, while it sets `is_held`."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("sequence", "signature", "left", "is_held", "num_marks", "is_stopped")
    ) + tuple((name, ctypes.c_uint64) for name in ("board", "flights", "latest", "first", "messages"))
    if TYPE_CHECKING:
        sequence: int
        signature: int
        left: int
        is_held: int
        num_marks: int
        is_stopped: int
        board: int
        flights: int
        latest: int
        first: int
        messages: int


class _Key(ctypes.Structure):
    """`struct key`: dtype and shape of a tensor."""

    # 6: MAX_DIMS in native/calls.h. Calls with tensors of more dims take Python's way.
    _fields_ = (("dtype", ctypes.c_int64), ("num_dims", ctypes.c_int64), ("shape", ctypes.c_int64 * 6))


class KnownCall(ctypes.Structure):
    """`struct known_call`: a collective that was made before, and how it runs."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("next", "kind", "op")),
        ("root", ctypes.c_int64),
        ("tensor", _Key),
        ("out", _Key),
        *((name, ctypes.c_uint64) for name in ("text", "text_bytes", "checksum", "act", "target", "reduction")),
        *((name, ctypes.c_uint64) for name in ("num_shown", "begin", "is_published", "source", "plan")),
        *((name, ctypes.c_uint64) for name in ("changes_tensor", "changes_out", "result_shape", "object")),
    )


class _Flight(ctypes.Structure):
    """`struct flight`: a collective that has ended."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("object", "code", "instruction", "sequence", "signature", "thread")),
        *((name, ctypes.c_double) for name in ("started", "ended")),
    )


class _Flights(ctypes.Structure):
    """`struct flights`: a ring of the last collectives, with `size` entries from `ring` on."""

    _fields_ = (("count", ctypes.c_uint64), ("size", ctypes.c_uint64), ("ring", _Flight * 0))


class Flights:
    """Ring of collectives that the native library began and ended. They are kept until it is collected."""

    def __init__(self, size: int) -> None:
        """Makes a ring that holds the last `size` ones."""
        num_bytes = ctypes.sizeof(_Flights) + size * ctypes.sizeof(_Flight)
        # Of 64-bit words, so that its entries are aligned.
        self._memory = (ctypes.c_uint64 * (num_bytes // 8))()
        _Flights.from_buffer(self._memory).size = size
        self.address = ctypes.addressof(self._memory)
        """Of the ring in this process."""

    def __del__(self) -> None:
        core.clear_flights(self.address)

    def entries(self) -> list[tuple[Any, ...]]:
        """Returns (object of the call, code, instruction, number, signature, thread, started, ended), oldest first."""
        found: list[tuple[Any, ...]] = core.list_flights(self.address)
        return found


class Bell(ctypes.Structure):
    """`struct bell`: wake-up of another rank. Its last field belongs to Python, which sets it to `NO_FD` at the end."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("asleep", "rung", "fd"))
    if TYPE_CHECKING:
        asleep: int
        rung: int
        fd: int


class Outlet(ctypes.Structure):
    """`struct outlet`: writing end of a ring."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("ring", "ring_bytes", "small_bytes", "records_word", "taken_word", "bell", "records", "taken")
    )
    if TYPE_CHECKING:
        records: int


class Inlet(ctypes.Structure):
    """`struct inlet`: reading end of a ring, and the record that `find` found in it."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("ring", "ring_bytes", "records_word", "taken_word", "waiting_word")),
        *((name, ctypes.c_uint64) for name in ("bell", "most_head_bytes", "taken", "told", "available")),
        *((name, ctypes.c_uint64) for name in ("head", "head_bytes", "payload", "record_bytes", "part", "part_bytes")),
    )
    if TYPE_CHECKING:
        taken: int
        available: int
        head: int
        head_bytes: int
        payload: int
        record_bytes: int
        part: int
        part_bytes: int


PREFIX_BYTES = 24
"""Length of a record before its header."""
NO_FD = (1 << 64) - 1
"""In place of an eventfd that is closed."""


def message(end: int, head: bytes, num_bytes: int, dtype: int, shape: Sequence[int]) -> bytes:
    """Returns a `struct message` for `send` and `receive`: messages with equal headers.

    Args:
        end: address of the `Outlet` or `Inlet`.
        head: the header.
        num_bytes: of the payload.
        dtype: of the tensors, as `type_of` tells it.
        shape: of the tensors.
    """
    return struct.pack(f"<5Q{len(shape)}q", end, len(head), num_bytes, dtype, len(shape), *shape) + head


class Prepared(ctypes.Structure):
    """`struct prepared`: messages that a group makes in one call."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("next", "message")),
        *((name, ctypes.c_int64) for name in ("peer", "tag")),
        *((name, ctypes.c_uint64) for name in ("is_send", "spin", "count", "acquire", "release", "progress")),
        ("receiver", ctypes.c_uint64),
        ("queues", ctypes.c_uint64 * 4),
        *((name, ctypes.c_uint64) for name in ("like", "shape", "object")),
    )


class _Method(ctypes.Structure):
    """`PyMethodDef`: an entry of the library's table."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_OF_A_GROUP = (b"run_known", b"send_known", b"receive_known")
"""Functions that are builtins of their own for each group: `run_known_of(address)` makes one."""


class Unusable(Exception):
    """Reason why there is no library."""


def load(path: Path = _PATH) -> SimpleNamespace:
    """Loads the library and returns its functions by name.

    Raises:
        Unusable: it is turned off, was not built, or does not fit.
    """
    if os.environ.get(VARIABLE) == "0":
        raise Unusable(f"{VARIABLE}=0 turns the native library off")
    if sys.byteorder != "little" or sys.maxsize < 1 << 32:
        raise Unusable("the native library needs a 64-bit little-endian Python")
    if not path.exists():
        raise Unusable("the native library was not built: install Echelon again, with a C compiler (gcc) in PATH")
    try:
        # PyDLL: its functions are called with the interpreter's lock.
        table = ctypes.addressof(_Method.in_dll(ctypes.PyDLL(str(path)), "echelon_methods"))
    except (OSError, ValueError) as error:  # ValueError: the file has no such table
        raise Unusable(f"the native library cannot be loaded: {error}") from None
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    functions = SimpleNamespace()
    # The last entry of the table has no name.
    while name := _Method.from_address(table).name:
        setattr(functions, name.decode(), make(table, None, None))
        if name in _OF_A_GROUP:
            setattr(functions, f"{name.decode()}_of", partial(_bind, make, table))
        table += ctypes.sizeof(_Method)
    # The library is compiled without Python.h, so that it fits any build of Python: one without a global lock, or for
    # debugging, has a longer head before the fields of an object.
    memmove = ctypes.cast(ctypes.CDLL(None).memmove, ctypes.c_void_p).value
    if functions.set_up(memmove, object.__basicsize__) != _VERSION:
        raise Unusable("the native library is of another version of Echelon: install Echelon again")
    return functions


def _bind(make: Callable[..., Any], method: int, address: int) -> Callable[..., Any]:
    """Returns a builtin of a method whose `self` is an address."""
    found: Callable[..., Any] = make(method, address, None)
    return found


def _absent(*_: object) -> bool:
    return False


def _load() -> tuple[SimpleNamespace, str]:
    try:
        return load(), ""
    except Unusable as why:
        return SimpleNamespace(copy=ctypes.memmove, combine=_absent, use_tensors=_absent), str(why)


core, OBSTACLE = _load()
"""Functions of the library, and why there is none: "" if there is one."""

copy: Callable[[int, int, int], Any] = core.copy
"""Copies bytes: takes the addresses of target and source, and their number."""
combine: Callable[..., bool] = core.combine
"""Reduces tensors: takes an index of `OPS`, the target, and the sources. False if nothing was done."""
use_tensors: Callable[[object, type, type, None], bool] = core.use_tensors
"""Has `combine` and the board take tensors: by DLPack's table of functions, and the classes that are ordinary."""
OPS = ("sum", "mean", "max", "min")
"""Reductions that the library has."""
