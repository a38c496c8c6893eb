"""Two ranks of one host whose threads are tasks of the simulation's scheduler: one runs at a time, in any order wanted.

The ranks are the real ones from `TcpBackend` down to the native library's C and the words in a real segment, their
threads in the background included. What is replaced is what could let a thread run by itself: locks, conditions,
threads, epolls, eventfds, the clock. At each of them, and at each word that is stored or loaded, another task may have
its turn. Words and data are those of C11's memory model, see `native_explorer`. Whoever sleeps does
so until it is woken: no time limit comes to the rescue, so a wake-up that is missed is a deadlock.
"""

import contextlib
import copy
import functools
import itertools
import logging
import os
import select
import threading
import types

import torch

from echelon.backends.connect.members import Member
from echelon.backends.connect.rendezvous import ConnectedRanks
from echelon.backends.formats import message_layout
from echelon.backends.formats.arena import MAX_PART_BYTES, MIN_PART_BYTES, Arena
from echelon.backends.formats.wire import Tag
from echelon.backends.shared.collectives import native_calls
from echelon.backends.shared.collectives.native_calls import NativeCalls
from echelon.backends.shared.memory import segment as segment_module
from echelon.backends.shared.memory.segment import Segment
from echelon.backends.shared.messages import message_region, receiver, sender
from echelon.backends.tcp import backend as tcp_backend
from echelon.backends.tcp import poller, progress, reader
from echelon.backends.tcp.link import Link
from echelon.backends.work import Work
from echelon.operation_records import FlightRecorder
from tests.helpers.native_explorer import Explorer, library

SIZES = message_layout.Sizes(
    ring_bytes=1024, small_bytes=64, inline_bytes=64, piece_bytes=128, whole_bytes=512, circle_bytes=256
)
EITHER_WAY = SIZES._replace(inline_bytes=256)
"""Messages of 65 to 256 bytes lie in the ring if it has room, else in a part."""
ONE_SLOT = SIZES._replace(circle_bytes=SIZES.piece_bytes)
"""With room for one piece of a message that goes round in a circle."""
NUM_PARTS = 3
"""That an arena has."""
MAX_LENT_BYTES = 160
"""How much of them may be tensors unless told otherwise: one or two."""
MOST_AT_ONCE = 3
"""How much is taken in before others are looked at."""
FOR_EVER = 1e9


class Lock:
    """One that a thread may hold several times, as some of the real ones."""

    def __init__(self, host):
        self._host = host
        self._owner = None
        self._count = 0
        self._waiting = []

    def acquire(self, blocking=True):
        host = self._host
        host.point()
        own = host.scheduler.current() if host.is_running else "the test"
        while self._owner not in (None, own):
            if not blocking:
                return False
            self._waiting.append(Work(None, "a lock"))
            host.wait(self._waiting[-1])
        self._owner = own
        self._count += 1
        return True

    def release(self):
        self._count -= 1
        if not self._count:
            self._owner = None
            if self._waiting:
                self._waiting.pop(0).complete()
        self._host.point()

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        self.release()


class Condition:
    def __init__(self, host, lock):
        self._host = host
        self._lock = lock
        self._waiting = []

    def wait(self, timeout=None):
        told = Work(None, "a condition")
        self._waiting.append(told)
        self._lock.release()
        self._host.wait(told)
        self._lock.acquire()
        return True

    def notify(self):
        if self._waiting:
            self._waiting.pop(0).complete()

    def notify_all(self):
        while self._waiting:
            self.notify()


class Epoll:
    """Knows eventfds; other files have nothing to say here."""

    def __init__(self, explorer):
        self._explorer = explorer
        self._host = host = explorer.host
        self._masks = {}
        self._edges = set()
        self._sleepers = []
        host.epolls.append(self)

    def register(self, fd, mask):
        self._masks[fd] = mask

    def modify(self, fd, mask):
        self._masks[fd] = mask

    def unregister(self, fd):
        del self._masks[fd]

    def on_ring(self, fd):
        if self._masks.get(fd, 0) & select.EPOLLET:
            self._edges.add(fd)
        if self._sleepers and self._ready():
            self._sleepers.pop().complete()

    def poll(self, seconds=-1):
        self._host.point()
        if seconds != 0 and not self._ready():
            self._host.num_sleeps += 1
            self._sleepers.append(Work(None, "a bell"))
            self._host.wait(self._sleepers[-1])
        events = [(fd, select.EPOLLIN) for fd in self._ready()]
        self._edges.clear()
        if events:
            self._explorer.hear()
        return events

    def _ready(self):
        levels = [fd for fd, mask in self._masks.items() if not mask & select.EPOLLET and self._host.rings.get(fd)]
        return [*levels, *self._edges]

    def close(self):
        self._masks.clear()


class Socket:
    """A connection over which nothing comes."""

    def __init__(self, number):
        self._number = number

    def fileno(self):
        return -2 - self._number

    def getsockname(self):
        return (f"10.0.0.{self._number}", 1)

    def getpeername(self):
        return (f"10.0.1.{self._number}", 1)

    def setsockopt(self, *_):
        pass

    def setblocking(self, _):
        pass

    def close(self):
        pass


class Memory:
    """Bytes of a region. Counters are read word by word as the memory model allows, and others may come in between."""

    def __init__(self, memory, address, num_bytes, explorer):
        self._memory = memory
        self._address = address
        self._counters = num_bytes
        self._explorer = explorer

    def __getitem__(self, index):
        if index.stop > self._counters:
            self._explorer.reads(self._address + index.start, index.stop - index.start)
            return self._memory[index]
        words = (self._explorer.relaxed(self._address + at) for at in range(index.start, index.stop, 8))
        return b"".join(word.to_bytes(8, "little") for word in words)


class OneMapping(Segment):
    """Segment whose parts all ranks map at the same addresses, by which the memory model knows a word."""

    def __init__(self, fd, num_ranks, number, mapped):
        super().__init__(fd, num_ranks, number)
        self._mapped = mapped

    def map(self, offset, num_bytes):
        if offset not in self._mapped:
            self._mapped[offset] = super().map(offset, num_bytes)
        return self._mapped[offset]


class SimulatedPost(message_region.MessageRegion):
    """The real one, whose counters are read under the memory model."""

    def __init__(self, segment, number, doorbells, sizes, explorer):
        super().__init__(segment, number, doorbells, sizes)
        real = self.region
        size = message_region._words_bytes(self.num_ranks)
        self.region = types.SimpleNamespace(
            memory=Memory(real.memory, real.address, size, explorer), data=real.data, address=real.address
        )


class _Stub:
    """A module with some of its names replaced."""

    def __init__(self, module, **names):
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name):
        return getattr(self._module, name)


@contextlib.contextmanager
def two_ranks(
    path,
    order,
    *,
    stale=lambda _: 0,
    max_unclaimed_bytes=1 << 30,
    max_lent_bytes=MAX_LENT_BYTES,
    sizes=SIZES,
    has_cores=False,
):
    """Gives an explorer and the backends of two ranks on its host, whose `add` and `run` then run programs on them.

    Args:
        path: of the native library, compiled for exploration.
        order: says whose turn it is.
        stale: as in `Explorer`.
    """
    explorer = Explorer(order, 2, stale)
    host, explored = explorer.host, library(path)
    explored.use(explorer.access)
    core = _checked(explored.core, explorer)
    ticks = itertools.count()
    clock = _Stub(None, monotonic=lambda: next(ticks) * 1e-3)
    system = _Stub(
        os,
        eventfd=host.eventfd,
        eventfd_write=host.eventfd_write,
        eventfd_read=host.eventfd_read,
        close=lambda _: None,
        sched_yield=host.point,
    )
    names = [
        (poller, "os", system),
        (poller, "time", clock),
        (poller, "select", _Stub(select, epoll=lambda: Epoll(explorer))),
        (poller, "_LOOKS", 2),
        (reader, "_MOST_AT_ONCE", MOST_AT_ONCE),
        (progress, "time", clock),
        (
            progress,
            "threading",
            _Stub(
                threading,
                Lock=lambda: Lock(host),
                Condition=lambda lock: Condition(host, lock),
                Thread=lambda target, name, daemon: _Thread(host, target),  # noqa: ARG005
            ),
        ),
        (message_region, "os", system),
        *((module, "core", core) for module in (message_region, native_calls, receiver, segment_module, sender)),
        (receiver, "_MAX_LENT_BYTES", max_lent_bytes),
    ]
    logging.getLogger("echelon").addFilter(_nothing_said)
    before = [(module, name, getattr(module, name)) for module, name, _ in names]
    first = Segment.create(2)
    mapped = {}
    segments = [OneMapping(os.dup(first.fd), 2, number, mapped) for number in range(2)]
    try:
        for module, name, value in names:
            setattr(module, name, value)
        doorbells = [host.eventfd() for _ in range(2)]
        posts = [SimulatedPost(segment, number, doorbells, sizes, explorer) for number, segment in enumerate(segments)]
        backends = [_backend(host, at, max_unclaimed_bytes, has_cores) for at in posts]
        for backend in backends:
            tcp_backend._open_backends.discard(backend)  # a forked child would close its files, which are not there
        yield explorer, backends
    finally:
        logging.getLogger("echelon").removeFilter(_nothing_said)
        for module, name, value in before:
            setattr(module, name, value)
        for segment in (first, *segments):
            segment.close()


def _checked(core, explorer):
    """Returns the functions of a library, so that each raises what went wrong in one of its accesses."""

    def checked(function):
        def call(*arguments):
            result = function(*arguments)
            explorer.check()
            return result

        return call

    return types.SimpleNamespace(**{name: checked(function) for name, function in vars(core).items()})


def _nothing_said(_):
    return False


class _Thread:
    def __init__(self, host, target):
        self._host = host
        self._target = target

    def start(self):
        self._host.add_thread(self._host.rank, self._target, 9)


def _backend(host, at, max_unclaimed_bytes, has_cores):
    host.rank = at.number
    backend = tcp_backend.TcpBackend.__new__(tcp_backend.TcpBackend)
    members = tuple(Member(rank, "10.0.0.1", 1, 1, "a machine") for rank in range(2))
    connected = ConnectedRanks(members, {1 - at.number: Socket(at.number)})
    backend._open(at.number, 2, FOR_EVER, connected, 1 << 30, max_unclaimed_bytes)
    backend._has_cores = has_cores
    peer = 1 - at.number
    sending = sender.RingSender(at, peer)
    sending._parts._arena = _small_arena()
    link = Link(peer, sending, receiver.RingReceiver(at, peer, 1 << 30))
    backend.use_links({peer: link}, at, at.doorbells.own)
    backend.known, backend.learnt = NativeCalls(), set()
    backend.known.record_into(FlightRecorder(), 1)
    return backend


def _small_arena():
    """Returns an arena in which few parts are free."""
    return copy.deepcopy(_smaller_arena())


@functools.cache
def _smaller_arena():
    arena = Arena(MAX_PART_BYTES)
    for _ in range(MAX_PART_BYTES // MIN_PART_BYTES - NUM_PARTS):
        arena.take(MIN_PART_BYTES)
    return arena


def values(number, length):
    """Returns what message `number` consists of."""
    return (torch.arange(length, dtype=torch.float32) * 7 + number) % 1000


def tag(number=0):
    return Tag(0, 0, number)
