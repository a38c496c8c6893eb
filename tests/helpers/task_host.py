"""Host of simulated ranks whose threads are tasks of a scheduler: one runs at a time, in any order wanted."""

import itertools
import math
import random

from echelon.simulation.process.random_state import on_one_core
from echelon.simulation.scheduler import Ended, Scheduler


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
