"""Simulated ranks that run the native library's own C in any order, under the rules of C11's memory model.

The library is compiled so that every access to shared memory calls `Explorer`. Ranks are tasks of the simulation's
scheduler, and another one may go on at each access. A load may return an older store than the last one, unless the rank
must know of a later one: a release store carries the clock of its rank, and an acquire load of it joins that. So a
relaxed store in place of a release is found, which an x86 processor would never show. Copies of data must have happened
before what touches the same bytes next. Nobody's sleep ends by itself, so a wake-up that is missed is a deadlock.

The model knows no load that takes a value from the future, and its fences are a little stronger than C11's.
"""

import contextlib
import ctypes
import functools
import runpy
from pathlib import Path

import pytest
import torch

from echelon import _native
from echelon.backends.formats import memory_layout
from echelon.backends.shared.collectives import native_calls, sync_block
from echelon.backends.shared.collectives.sync_block import SyncBlock
from echelon.backends.shared.memory import segment
from echelon.backends.shared.memory.segment import Segment
from echelon.backends.shared.memory.waiting import SpinThenSleep
from echelon.backends.work import Work
from tests.helpers.task_host import Host

FOLDER = Path(__file__).parents[2] / "native"
BUILD = runpy.run_path(str(FOLDER / "build.py"))
LOADS, STORES, FENCES, READS, WRITES, SLEEPS, WAKES, YIELDS, RINGS = range(9)
MARK = 100
ACQUIRE, RELEASE = 2, 3
_CALLBACK = ctypes.PYFUNCTYPE(ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
_GRANULE = 8
_OPTIONS = ("-O0", "-DECHELON_EXPLORE")


class Race(Exception):
    """A rank touches bytes that another one has not finished with, as far as it can know."""


def compile_explored(tmp_path, folder=FOLDER, name="explored"):
    """Compiles the sources in a folder with calls at each access. Skips the test where there is no compiler."""
    compiler = BUILD["system_compiler"]()
    if compiler is None:
        pytest.skip("exploring the native library needs a C compiler of the system")
    path = tmp_path / f"{name}.so"
    sources = [
        _object(tmp_path.parent, source, *compiler) if _is_unchanged(folder, source) else source
        for source in BUILD["SOURCES"]
    ]
    BUILD["compile_library"](path, compiler, *_OPTIONS, folder=folder, sources=sources)
    return path


def _is_unchanged(folder, source):
    """Whether a source and all headers are those of the project: a mutation changes one file."""
    names = [source, *(header.name for header in FOLDER.glob("*.h"))]
    return all((folder / name).read_bytes() == (FOLDER / name).read_bytes() for name in names)


@functools.cache
def _object(folder, source, *compiler):
    """Compiles a source of the project once for all tests of a process."""
    path = folder / f"{source}.o"
    BUILD["compile_library"](path, compiler, *_OPTIONS, "-c", sources=[source])
    return str(path)


class Library:
    """The functions of an explored library, and the way to hear of its accesses."""

    def __init__(self, path):
        self.core = _native.load(path)
        self.core.use_tensors(torch.Tensor.__dlpack_c_exchange_api__, torch.Tensor, torch.nn.Parameter, None)
        self._set = ctypes.PyDLL(str(path)).set_explore
        self._set.argtypes = (_CALLBACK,)

    def use(self, function):
        self._callback = _CALLBACK(function)
        self._set(self._callback)


@functools.cache
def library(path):
    return Library(path)


class Explorer:
    """The memory of some ranks, and whose turn it is."""

    def __init__(self, order, num_ranks, stale):
        self.host = Host(order)
        self._stale = stale
        """Function that draws how many of so many older stores a load goes back."""
        self._clocks = [[0] * num_ranks for _ in range(num_ranks)]
        self._fenced = [0] * num_ranks
        self._rung = [0] * num_ranks
        self._stores = {}
        """Of each word: value, rank, that rank's time, and the clock that a release carries."""
        self._seen = [{} for _ in range(num_ranks)]
        self._writes, self._reads = {}, {}
        self._woken, self._sleepers = {}, {}
        self.impatient = set()
        """Ranks whose sleeps end at once."""
        self.gave_up = set()
        """Ranks that gave up. From then on sleeps end by themselves, as after 20 ms, and the sleepers look around."""
        self._names = ctypes.c_uint64
        self.window = None
        """Region that all ranks map."""
        self.error = None
        self.marks = set()
        """Numbers from MARK on that the library called with: a test plants such calls."""

    def access(self, what, address, value, order):
        """Called by the library. Raises nothing, as C would not know what to do with that."""
        if what >= MARK:
            self.marks.add(what)
            return 0
        if not self.host.is_running or self.error is not None:
            return self._plainly(what, address, value)
        try:
            self.host.point()
            return self._access(self.host.scheduler.current().rank, what, address, value, order)
        except BaseException as error:
            self.error = self.error or error
            return self._plainly(what, address, value)

    def _plainly(self, what, address, value):
        if what == LOADS:
            return self._names.from_address(address).value
        if what == STORES:
            self._names.from_address(address).value = value
        return 0

    def relaxed(self, address):
        """Loads a word for Python, which reads it without the library."""
        return self.access(LOADS, address, 0, 0)

    def reads(self, address, num_bytes):
        """Python reads data without the library."""
        self.access(READS, address, num_bytes, 0)
        self.check()

    def hear(self):
        """An eventfd has told the running rank something: it knows what the ranks knew that rang."""
        if self.host.is_running:
            self._join(self.host.scheduler.current().rank, self._rung)

    def _access(self, rank, what, address, value, order):
        clock = self._clocks[rank]
        clock[rank] += 1
        if what == LOADS:
            return self._load(rank, address, order in (1, ACQUIRE))
        if what == STORES:
            self._history(address).append((value, rank, clock[rank], list(clock) if order == RELEASE else None))
            self._seen[rank][address] = len(self._stores[address]) - 1
            self._names.from_address(address).value = value  # for what Python reads, and the next run
        elif what == FENCES:
            self._join(rank, self._fenced)
            self._fenced = list(self._clocks[rank])
        elif what in (READS, WRITES):
            self._touch(rank, address, value, what == WRITES)
        elif what == SLEEPS:
            self._sleep(rank, address, value)
        elif what == RINGS:
            self._rung = list(map(max, self._rung, clock))
            self.host.eventfd_write(address, 1)
        elif what == WAKES:
            self._woken[address] = list(clock)
            for sleeper, work in self._sleepers.pop(address, ()):
                self._join(sleeper, clock)
                work.complete()
        return 0

    def _history(self, address):
        found = self._stores.get(address)
        if found is None:
            found = self._stores[address] = [(self._names.from_address(address).value, 0, 0, None)]
        return found

    def _load(self, rank, address, acquires):
        history, clock = self._history(address), self._clocks[rank]
        first = self._seen[rank].get(address, 0)
        # Stores that happened before hide those before them.
        for number in range(len(history) - 1, first, -1):
            if history[number][2] <= clock[history[number][1]]:
                first = number
                break
        number = len(history) - 1 - self._stale(len(history) - first)
        self._seen[rank][address] = number
        value, _, _, carried = history[number]
        if acquires and carried is not None:
            self._join(rank, carried)
        return value

    def _join(self, rank, other):
        self._clocks[rank] = list(map(max, self._clocks[rank], other))

    def _touch(self, rank, address, num_bytes, is_write):
        clock = self._clocks[rank]
        for at in range(address // _GRANULE, -(-(address + num_bytes) // _GRANULE)):
            for before in (self._writes, self._reads) if is_write else (self._writes,):
                for other, time in before.get(at, {}).items():
                    if other != rank and time > clock[other]:
                        did = "writes" if before is self._writes else "reads"
                        raise Race(f"rank {rank} {'writes' if is_write else 'reads'} what rank {other} {did}")
            (self._writes if is_write else self._reads).setdefault(at, {})[rank] = clock[rank]

    def _sleep(self, rank, address, value):
        # The kernel has a lock for the word: who sleeps after a wake-up knows what the waker knew.
        self._join(rank, self._woken.get(address, self._clocks[rank]))
        if (
            self._load(rank, address, False) & 0xFFFFFFFF != value & 0xFFFFFFFF
            or self.gave_up
            or rank in self.impatient
        ):
            return
        work = Work(None, f"rank {rank} sleeps")
        self._sleepers.setdefault(address, []).append((rank, work))
        self.host.num_sleeps += 1
        self.host.wait(work)

    def give_up(self, rank):
        """Ends all sleeps, now and from now on."""
        self.gave_up.add(rank)
        for sleepers in self._sleepers.values():
            for _, work in sleepers:
                work.complete()
        self._sleepers.clear()

    def check(self):
        """Raises what went wrong in an access of the running rank, or that the play has ended."""
        if self.error is not None:
            raise self.error


class GaveUp(Exception):
    """A rank has given up an operation, and the others learn that."""


@contextlib.contextmanager
def boards(path, order, num_ranks, *, crowded=False, stale=lambda _: 0):
    """Gives an explorer and a board for each rank. `explorer.host` runs programs that use them."""
    explorer = Explorer(order, num_ranks, stale)
    explored = library(path)
    explored.use(explorer.access)
    users = (sync_block, segment, native_calls, _native)
    before = [user.core for user in users]
    for user in users:
        user.core = explored.core
    made = Segment.create(num_ranks)

    def look_around(*_):
        explorer.check()
        if explorer.gave_up:
            raise GaveUp

    try:
        size = num_ranks * memory_layout.ROOM_BYTES
        window = made.map(made.allocate(size), size)
        explorer.window = window
        blocks = []
        for rank in range(num_ranks):
            waiter = SpinThenSleep(1000 if crowded else 1)
            waiter._state.spin, waiter._state.yields = 1, 1
            blocks.append(SyncBlock(window, range(num_ranks), rank, waiter, look_around))
        yield explorer, blocks
    finally:
        for user, core in zip(users, before, strict=True):
            user.core = core
        made.close()
