"""What was sent and has not left yet.

Strategy. Most messages are with the operating system as soon as they are sent, and what was posted is looked at by the
thread that waits for it; so that thread attends to all it starts, and none in the background is woken for it, which
takes longer than a small message. A message that does not leave at once must not wait for this thread, which computes:
until it has left, the background is called.

A tensor of a device has left, for the CPU, when it is queued. The device's own stream waits for it at the end of the
step only: what is computed meanwhile does not touch it.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from echelon.backends.work import Work
from echelon.group import ProcessGroup


class Outbox:
    """Watches over sends. A context: inside, the calling thread attends to what it starts."""

    def __init__(self, group: ProcessGroup) -> None:
        """Makes an empty one.

        Args:
            group: whose backend sends.
        """
        self._group = group
        self._under_way: list[Work[None]] = []
        self._left: list[Work[None]] = []
        self._attendance: ExitStack | None = None

    def __enter__(self) -> Outbox:
        self._attend()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._leave()

    def add(self, works: list[Work[None]]) -> None:
        """Takes sends that were started."""
        self._under_way += works
        self.look()

    def look(self) -> None:
        """Lets go of what has left.

        Raises:
            PeerFailed, Timeout: a send that failed.
        """
        under_way = []
        for work in self._under_way:
            if not work.is_completed():
                under_way.append(work)
            elif error := work.exception():
                raise error
            else:
                self._left.append(work)
        self._under_way = under_way
        if under_way:
            self._leave()
        else:
            self._attend()

    def flush(self) -> None:
        """Waits until all has left.

        Raises:
            PeerFailed, Timeout: a send that failed, or does not leave.
        """
        for work in (*self._left, *self._under_way):
            work.wait(self._group.timeout)
        self._left.clear()
        self._under_way.clear()

    def _attend(self) -> None:
        if self._attendance is None:
            self._attendance = ExitStack()
            self._attendance.enter_context(self._group.backend.attend())

    def _leave(self) -> None:
        if self._attendance is not None:
            self._attendance.close()
            self._attendance = None
