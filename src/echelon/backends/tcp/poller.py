"""What a waiting thread watches: file descriptors with their handlers, in one epoll.

Strategy. `wait` is called by one thread at a time, without the lock that guards the rest. A thread that has a core to
itself first looks again and again without sleeping: to put a thread to sleep and wake it takes longer than most answers
take to come. Where several waits in a row took longer than that, as while a link brings a large message, it sleeps at
once, until a wait was short again.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import TypeAlias

from echelon.backends.tcp.link import Link, Memory

Handler: TypeAlias = Callable[[int], None]
"""Called with the events of a file descriptor, with the lock held."""
Events: TypeAlias = list[tuple[int, int]]
"""File descriptors and what happened to them."""

_LOOKS = 100
"""How often a thread that has a core to itself looks into memory before it looks at files as well."""
_NEWS_BEFORE_FILES = 16
"""How many waits may end with news from memory before files are looked at."""
SPIN_SECONDS = 200e-6
"""How long a thread looks again and again. Waking one that sleeps took 60 us on the machine of benchmarks/tcp."""
_MOST_SPINS_IN_VAIN = 4
"""After how many waits in a row that took longer nobody looks again and again."""
_MEMORY_SPIN_SECONDS = 2e-3
"""The same where peers write to memory, about as long as a stage of a small pipeline computes. Between two looks the
core is offered to others."""


class Poller:
    """The epoll of one backend, and an eventfd that ends a wait from outside."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._handlers: dict[int, Handler] = {}
        self._alarms: list[tuple[float, Callable[[], None]]] = []
        self._memory: Memory | None = None
        self._on_news: Callable[[], None] = _nothing
        self._num_news = 0
        self._num_in_vain = 0
        """How many waits in a row were longer than it is looked again and again."""
        self.watch(self._wakeup, self._on_wakeup)

    def watch(self, fd: int, handler: Handler) -> None:
        """Has `handler` called when `fd` can be read."""
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def watch_memory(self, memory: Memory, on_news: Callable[[], None]) -> None:
        """Has `on_news` called when peers have written something there."""
        self._memory, self._on_news = memory, on_news
        self._handlers[memory.doorbell] = _ignore
        self._epoll.register(memory.doorbell, select.EPOLLIN | select.EPOLLET)  # every ring counts, so none is read

    def watch_for(self, fd: int, events: int) -> None:
        """Has the handler of `fd` called for these events from now on (select.EPOLLIN and so on)."""
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Takes back `watch`; to be called before `fd` is closed."""
        del self._handlers[fd]
        self._epoll.unregister(fd)

    def call_in(self, seconds: float, callback: Callable[[], None]) -> None:
        """Has `callback` called by `dispatch` after so many seconds, if anybody waits then, or else later."""
        self._alarms.append((time.monotonic() + seconds, callback))

    def wait(self, seconds: float, spins: bool) -> Events:
        """Returns what has happened, as soon as anything has or when the time is up. To be called without the lock.

        Args:
            seconds: below 0: for ever.
            spins: look again and again before sleeping.
        """
        if self._alarms:
            left = max(0.0, min(when for when, _ in self._alarms) - time.monotonic())
            seconds = min(seconds, left) if seconds >= 0 else left
        if self._memory is not None:
            return self._wait_for_both(self._memory, seconds, spins)
        if not spins:
            return self._epoll.poll(seconds)
        begin = time.monotonic()
        events = self._look_again_and_again(begin, seconds) or self._epoll.poll(seconds)
        self._num_in_vain = 0 if time.monotonic() - begin < SPIN_SECONDS else self._num_in_vain + 1
        return events

    def _look_again_and_again(self, begin: float, seconds: float) -> Events:
        """Looks at files until something has happened or looking takes too long; not where that was in vain before."""
        if self._num_in_vain >= _MOST_SPINS_IN_VAIN:
            return []
        until = begin + (min(seconds, SPIN_SECONDS) if seconds >= 0 else SPIN_SECONDS)
        look = self._epoll.poll
        while True:
            events = look(0)
            if events or time.monotonic() >= until:
                return events

    def _wait_for_both(self, memory: Memory, seconds: float, spins: bool) -> Events:
        """Waits for files and for news in memory. News are quick to see; every so often files come first."""
        self._num_news += 1
        if self._num_news % _NEWS_BEFORE_FILES == 0 and (events := self._epoll.poll(0)):
            return events
        if memory.has_news():
            return []
        if spins:
            for _ in range(_LOOKS):
                if memory.has_news():
                    return []
            until = time.monotonic() + (min(seconds, _MEMORY_SPIN_SECONDS) if seconds >= 0 else _MEMORY_SPIN_SECONDS)
            while time.monotonic() < until:
                if events := self._epoll.poll(0):
                    return events
                if memory.has_news():
                    return []
                os.sched_yield()
        if seconds == 0:
            return self._epoll.poll(0)
        try:
            return self._epoll.poll(seconds) if memory.fall_asleep() else []
        finally:
            memory.wake_up()

    def look_for(self, line: Link) -> bool:
        """Looks again and again whether a peer has written something; returns whether it did before one would sleep.

        In the end it is `wait` that looks at all there is, so nothing else is looked at here: not while something of
        this rank's own waits for room, however.
        """
        if self._memory is None or self._memory.is_full:
            return False
        for _ in range(_LOOKS):
            if line.has_written():
                return True
        until = time.monotonic() + _MEMORY_SPIN_SECONDS
        while time.monotonic() < until:
            os.sched_yield()
            if line.has_written():
                return True
        return False

    def dispatch(self, events: Events) -> None:
        """Calls the handlers of what has happened, and what is due."""
        for fd, mask in events:
            if handler := self._handlers.get(fd):
                handler(mask)
        if self._memory is not None and self._memory.look():
            self._on_news()
        if self._alarms:
            now = time.monotonic()
            due = [alarm for alarm in self._alarms if alarm[0] <= now]
            self._alarms = [alarm for alarm in self._alarms if alarm[0] > now]
            for _, callback in due:
                callback()

    def wake(self) -> None:
        """Ends the wait of whoever waits now, or else the next one."""
        os.eventfd_write(self._wakeup, 1)

    def _on_wakeup(self, _: int) -> None:
        os.eventfd_read(self._wakeup)

    def close(self) -> None:
        """Closes what is its own. Nobody may wait: closing an epoll does not wake who sleeps in it."""
        self._epoll.close()
        os.close(self._wakeup)


def _nothing() -> None: ...


def _ignore(_: int) -> None: ...
