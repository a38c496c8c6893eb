"""Two ranks of one host whose threads are tasks of the simulation's scheduler: one runs at a time, in any order wanted.

The ranks are the real ones from `TcpBackend` down to the words in a real segment, their threads in the background
included. What is replaced is what could let a thread run by itself: locks, conditions, threads, epolls, eventfds, the
clock. At each of them, and at each word that is stored or loaded, another task may have its turn. Whoever sleeps does
so until it is woken: no time limit comes to the rescue, so a wake-up that is missed is a deadlock.
"""

import contextlib
import copy
import functools
import itertools
import logging
import math
import os
import random
import select
import threading
import types

import torch

from echelon.backends.connect.members import Member
from echelon.backends.connect.rendezvous import World
from echelon.backends.formats import message_layout
from echelon.backends.formats.arena import MAX_PART_BYTES, MIN_PART_BYTES, Arena
from echelon.backends.formats.wire import Tag
from echelon.backends.shared.memory.segment import Segment
from echelon.backends.shared.messages import message_region, receiver, sender
from echelon.backends.tcp import backend as tcp_backend
from echelon.backends.tcp import poller, progress, reader
from echelon.backends.tcp.link import Link
from echelon.backends.work import Work
from echelon.simulation.process.random_state import on_one_core
from echelon.simulation.scheduler import Ended, Scheduler

SIZES = message_layout.Sizes(ring_bytes=1024, inline_bytes=64, piece_bytes=128, whole_bytes=512, circle_bytes=256)
ONE_SLOT = SIZES._replace(circle_bytes=SIZES.piece_bytes)
"""With room for one piece of a message that goes round in a circle."""
NUM_PARTS = 3
"""That an arena has."""
MAX_LENT_BYTES = 160
"""How much of them may be tensors unless told otherwise: one or two."""
MOST_AT_ONCE = 3
"""How much is taken in before others are looked at."""
FOR_EVER = 1e9


class Stuck(Exception):
    """All ranks sleep, and nobody will wake one."""


class Chance:
    """Tasks are interrupted where chance has it, and any other goes on."""

    def __init__(self, seed):
        chance = random.Random(f"order {seed}")
        self.draw = chance.random
        self._restless = chance.choice((0.01, 0.03, 0.1, 0.3))
        self._random = chance.random

    def interrupts(self):
        return self._random() < self._restless


class Interruptions:
    """Tasks are interrupted at the points given, and the one that has waited longest goes on."""

    def __init__(self, at):
        self.draw = itertools.count().__next__
        self._at = frozenset(at)
        self.num_points = 0

    def interrupts(self):
        self.num_points += 1
        return self.num_points in self._at


class Host:
    """What the two ranks share: one task at a time runs, and the order says which."""

    def __init__(self, order):
        self.order = order
        self.scheduler = Scheduler(order.draw)
        self.scheduler.on_stuck = self._explain
        self.is_running = False
        self.num_sleeps = 0
        self.rank = 0
        """For which a thread is started."""
        self._num_programs = 0
        self._fds = itertools.count(1 << 20)
        self.rings = {}
        """Of each eventfd, how often it was written since it was read."""
        self.epolls = []

    def point(self):
        """Called where others may come in between."""
        if self.is_running and not self.scheduler.is_ending and self.order.interrupts():
            self.scheduler.sleep(0.0)

    def wait(self, work):
        """Has the running task sleep until a Work is completed, however long that takes."""
        if not work.has_ended:
            self.scheduler.wait(work, math.inf, True)

    def compute(self):
        """Has the running task do nothing until all others sleep."""
        self.scheduler.sleep(1.0)

    def give_way(self):
        """Lets another task go first."""
        self.scheduler.sleep(0.0)

    def add(self, rank, program, number=0):
        """Adds a program; the ranks end when all programs have."""
        self._num_programs += 1
        self.add_thread(rank, lambda: self._run(program), number)

    def add_thread(self, rank, function, number):
        self.scheduler.add(rank, lambda: self._try(function), number)

    def _try(self, function):
        try:
            function()
        except Ended:
            raise
        except BaseException as error:
            self.scheduler.fail(error)

    def _run(self, program):
        program()
        self._num_programs -= 1
        if not self._num_programs:
            self.scheduler.is_ending = True
            self.scheduler.cancel()

    def run(self):
        self.is_running = True
        with on_one_core():
            self.scheduler.run()
        self.is_running = False
        error = self.scheduler.error
        self.scheduler.forget()
        if error is not None:
            raise error

    def _explain(self, tasks):
        return Stuck("; ".join(f"rank {task.rank}, thread {task.number}: {task.awaits.description}" for task in tasks))

    def eventfd(self, *_):
        fd = next(self._fds)
        self.rings[fd] = 0
        return fd

    def eventfd_write(self, fd, value):
        self.point()
        self.rings[fd] += value
        for each in self.epolls:
            each.on_ring(fd)
        self.point()

    def eventfd_read(self, fd):
        assert self.rings[fd], "this would raise BlockingIOError"
        self.rings[fd] = 0


class Lock:
    """One that a thread may hold several times, as some of the real ones."""

    def __init__(self, host):
        self._host = host
        self._owner = None
        self._count = 0
        self._waiting = []

    def acquire(self):
        host = self._host
        host.point()
        own = host.scheduler.current() if host.is_running else "the test"
        while self._owner not in (None, own):
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

    def __init__(self, host):
        self._host = host
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


class Words:
    """Words of shared memory at each of which others may come in between."""

    def __init__(self, words, point):
        self._words = words
        self._point = point

    def __getitem__(self, index):
        self._point()
        return self._words[index]

    def __setitem__(self, index, value):
        self._point()
        self._words[index] = value
        self._point()


class Memory(Words):
    """The same for the bytes of a region. Of more than one word, the words may be of different times."""

    def __getitem__(self, index):
        self._point()
        size = index.stop - index.start
        if size > message_layout.WORDS_BYTES:
            return self._words[index]
        return b"".join(self._word(at) for at in range(index.start, index.stop, 8))[:size]

    def _word(self, at):
        return self._words[at : at + 8]


class SimulatedPost(message_region.MessageRegion):
    """The real one, with a point at each word."""

    def __init__(self, segment, number, doorbells, sizes, host):
        super().__init__(segment, number, doorbells, sizes)
        self._host = host
        self.words = Words(self.words, host.point)
        self.region = types.SimpleNamespace(
            memory=Memory(self.region.memory, host.point), data=self.region.data, address=self.region.address
        )

    def map_arena(self, writer, reader):
        window, words = super().map_arena(writer, reader)
        return message_region.ArenaWindow(window, Words(words, self._host.point))


class _Stub:
    """A module with some of its names replaced."""

    def __init__(self, module, **names):
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name):
        return getattr(self._module, name)


class _NoLock:
    def acquire(self):
        return True


@contextlib.contextmanager
def two_ranks(order, *, max_unclaimed_bytes=1 << 30, max_lent_bytes=MAX_LENT_BYTES, sizes=SIZES, has_cores=False):
    """Gives a host and the backends of two ranks on it; `host.add` and `host.run` then run programs on them."""
    host = Host(order)
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
        (poller, "select", _Stub(select, epoll=lambda: Epoll(host))),
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
        (message_region, "threading", _Stub(threading, Lock=_NoLock, RLock=lambda: Lock(host))),
        (receiver, "_MAX_LENT_BYTES", max_lent_bytes),
    ]
    logging.getLogger("echelon").addFilter(_nothing_said)
    before = [(module, name, getattr(module, name)) for module, name, _ in names]
    first = Segment.create(2)
    segments = [first, Segment(os.dup(first.fd), 2, 1)]
    try:
        for module, name, value in names:
            setattr(module, name, value)
        doorbells = [host.eventfd() for _ in range(2)]
        posts = [SimulatedPost(segment, number, doorbells, sizes, host) for number, segment in enumerate(segments)]
        backends = [_backend(host, at, max_unclaimed_bytes, has_cores) for at in posts]
        for backend in backends:
            tcp_backend._open_backends.discard(backend)  # a forked child would close its files, which are not there
        yield host, backends
    finally:
        logging.getLogger("echelon").removeFilter(_nothing_said)
        for module, name, value in before:
            setattr(module, name, value)
        for segment in segments:
            segment.close()


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
    world = World(members, {1 - at.number: Socket(at.number)})
    backend._open(at.number, 2, FOR_EVER, world, 1 << 30, max_unclaimed_bytes)
    backend._has_cores = has_cores
    peer = 1 - at.number
    sending = sender.RingSender(at, peer)
    sending._parts._arena = _small_arena()
    link = Link(peer, sending, receiver.RingReceiver(at, peer, 1 << 30))
    backend.use_links({peer: link}, at, at.doorbells.own)
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
