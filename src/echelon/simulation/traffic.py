"""When messages between simulated ranks leave and arrive, and what moving them takes from computing."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from echelon.simulation.faults import FaultPlan
from echelon.simulation.network import Network
from echelon.simulation.scheduler import Scheduler
from echelon.simulation.task import Ended


class Passage(NamedTuple):
    """When a message leaves and arrives (math.inf: never), and its place among what happens then."""

    left: float
    done: float
    """When its sender takes it for arrived: faults on the way are unknown to it."""
    arrives: float
    draw: float


class Traffic:
    """The links between all ranks: who uses them, and until when. Called by whichever task runs; nothing blocks."""

    def __init__(
        self, scheduler: Scheduler, world_size: int, link: Callable[[int, int], Network], faults: FaultPlan
    ) -> None:
        self._scheduler = scheduler
        self._faults = faults
        self._link = link
        self._links: dict[tuple[int, int], Network] = {}
        self._free_at = [0.0] * world_size
        """When what each rank has sent will have left it."""
        self._last: dict[tuple[int, int], tuple[float, float]] = {}
        """For each pair, when its last message arrives, with its draw: none overtakes another."""
        self._num_computing = [0] * world_size
        """How many tasks of each rank compute now."""
        self._owed = [0.0] * world_size
        """The seconds by which moving messages has held up each rank's computing."""

    def send(self, src: int, dst: int, num_bytes: int) -> Passage:
        """Puts a message on its way."""
        link = self._links.get((src, dst)) or self._find_link(src, dst)
        left = max(self._scheduler.now, self._free_at[src]) + num_bytes / link.bandwidth
        self._free_at[src] = left
        passage = self._pass(src, dst, left, left + link.latency)
        if link.overhead and num_bytes:
            seconds = link.overhead * num_bytes
            self._hold_up_at(passage.left, src, seconds)
            self._hold_up_at(passage.arrives, dst, seconds)
        return passage

    def _find_link(self, src: int, dst: int) -> Network:
        try:
            link = self._links[src, dst] = self._link(src, dst)
        except Exception as error:  # the user's function: to tell the other ranks would take a link, too
            self._scheduler.fail(error)
            raise Ended from error
        return link

    def compute(self, rank: int, seconds: float) -> None:
        """Lets the time pass that the running task of a rank computes: longer where messages come and go meanwhile."""
        self._num_computing[rank] += 1
        try:
            while seconds > 0:
                self._scheduler.sleep(seconds)
                seconds, self._owed[rank] = self._owed[rank], 0.0
        finally:
            self._num_computing[rank] -= 1

    def _hold_up_at(self, time: float, rank: int, seconds: float) -> None:
        if time <= self._scheduler.now:
            self._hold_up(rank, seconds)
        elif time < math.inf:
            self._scheduler.at(time, partial(self._hold_up, rank, seconds))

    def _hold_up(self, rank: int, seconds: float) -> None:
        """Has a rank spend time on a message. One that only waits has the time."""
        if self._num_computing[rank]:
            self._owed[rank] += seconds

    def _pass(self, src: int, dst: int, left: float, arrives: float) -> Passage:
        done, draw = arrives, self._scheduler.draw()
        if self._faults.faults:
            arrives = self._faults.arrival(src, dst, left, arrives)
            if arrives == math.inf:
                self._scheduler.awaits_nothing_lost = False
        last = self._last.get((src, dst))
        if last is not None and last > (arrives, draw):
            arrives, draw = last
        self._last[src, dst] = (arrives, draw)
        return Passage(left, done, arrives, draw)
