"""Poller of one backend: an epoll of file descriptors with handlers, alarms, and memory that peers write to.

Strategy. `wait` is called by one thread at a time, without the lock that guards the rest. A thread that has a core to
itself spins before it sleeps: to put a thread to sleep and wake it takes longer than most answers take to come. After
several waits in a row that were longer, as while a large message arrives over a network, it sleeps at once, until a
wait was short again.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import TypeAlias

from echelon.backends.tcp.link import Memory, Receiver

Handler: TypeAlias = Callable[[int], None]
"""Called with the events of a file descriptor, with the lock held."""
Events: TypeAlias = list[tuple[int, int]]
"""Pairs of a file descriptor and its epoll events."""

_LOOKS = 100
"""Polls of memory alone, before a spinning thread polls files as well."""
_NEWS_BEFORE_FILES = 16
"""Number of waits that memory may end before files are polled, so that a busy link does not starve the sockets."""
SPIN_SECONDS = 200e-6
"""Seconds for which a thread spins. Waking a sleeping one took 60 us on the machine of benchmarks/tcp."""
_MOST_SPINS_IN_VAIN = 4
"""Number of longer waits in a row after which threads no longer spin."""
_MEMORY_SPIN_SECONDS = 2e-3
"""Seconds for which a thread spins where peers write to memory: about as long as a stage of a small pipeline computes.
Between two polls the core is offered to other threads."""


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
        """Number of waits in a row that were longer than `SPIN_SECONDS`."""
        self.watch(self._wakeup, self._on_wakeup)

    def watch(self, fd: int, handler: Handler) -> None:
        """Registers `handler`, which `dispatch` calls when `fd` can be read."""
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def watch_memory(self, memory: Memory, doorbell: int, on_news: Callable[[], None]) -> None:
        """Registers `on_news`, which `dispatch` calls when peers have written to `memory`.

        Args:
            memory: polled, and told when a thread sleeps.
            doorbell: becomes readable, with a new edge, when a peer writes while this rank sleeps.
            on_news: see above.
        """
        self._memory, self._on_news = memory, on_news
        self._handlers[doorbell] = _ignore
        self._epoll.register(doorbell, select.EPOLLIN | select.EPOLLET)  # edge-triggered: need not be read

    def watch_for(self, fd: int, events: int) -> None:
        """Sets the events of `fd` (select.EPOLLIN and so on)."""
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Unregisters `fd`; to be called before it is closed."""
        del self._handlers[fd]
        self._epoll.unregister(fd)

    def call_in(self, seconds: float, callback: Callable[[], None]) -> None:
        """Sets an alarm: `dispatch` calls `callback` after `seconds`, or later if no thread polls then."""
        self._alarms.append((time.monotonic() + seconds, callback))

    def wait(self, seconds: float, spins: bool) -> Events:
        """Blocks until an event, an alarm, a write to memory or the end of the time. To be called without the lock.

        Returns the events of files, none if memory or the time ended the wait.

        Args:
            seconds: below 0: for ever.
            spins: poll for a while before sleeping.
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
        """Spins on files until there are events or the spin is over. Returns at once where spins were in vain."""
        if self._num_in_vain >= _MOST_SPINS_IN_VAIN:
            return []
        until = begin + (min(seconds, SPIN_SECONDS) if seconds >= 0 else SPIN_SECONDS)
        look = self._epoll.poll
        while True:
            events = look(0)
            if events or time.monotonic() >= until:
                return events

    def _wait_for_both(self, memory: Memory, seconds: float, spins: bool) -> Events:
        """Waits for files and for memory. Memory is polled first: that takes no system call."""
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
        # First publish the sleep, then look once more: a peer that writes after that look rings the doorbell.
        try:
            return self._epoll.poll(seconds) if memory.fall_asleep() else []
        finally:
            memory.wake_up()

    def look_for(self, receiver: Receiver) -> bool:
        """Spins until a peer has written to its link. False if a thread would go to sleep first.

        Polls this link alone: `wait` polls the rest afterwards. False at once while a message of this rank waits for
        room, because only `wait` writes it.
        """
        return self._memory is not None and not self._memory.is_full and receiver.look(_MEMORY_SPIN_SECONDS)

    def dispatch(self, events: Events) -> None:
        """Calls the handlers of `events`, of memory and of due alarms. To be called with the lock."""
        for fd, mask in events:
            if handler := self._handlers.get(fd):  # a handler before it may have closed the file
                handler(mask)
        if self._memory is not None and self._memory.look():
            self._on_news()
        if self._alarms:
            now = time.monotonic()
            due = [alarm for alarm in self._alarms if alarm[0] <= now]
            self._alarms = [alarm for alarm in self._alarms if alarm[0] > now]  # first, as a callback may set others
            for _, callback in due:
                callback()

    def wake(self) -> None:
        """Ends the current `wait`, or else the next one."""
        os.eventfd_write(self._wakeup, 1)

    def _on_wakeup(self, _: int) -> None:
        os.eventfd_read(self._wakeup)

    def close(self) -> None:
        """Closes epoll and eventfd. No thread may wait: closing an epoll does not wake a thread that sleeps in it."""
        self._epoll.close()
        os.close(self._wakeup)


def _nothing() -> None: ...


def _ignore(_: int) -> None: ...
