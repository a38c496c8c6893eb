"""A thread that takes turns with others, and what a scheduler knows of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from threading import get_ident

from echelon.backends.work import Work


class Ended(BaseException):
    """Makes a task leave: its rank was killed, or the simulation is over. No error: programs need not expect it."""


class Task:
    """A thread that takes turns with others."""

    __slots__ = (
        "_body",
        "_leave",
        "awaits",
        "deadline",
        "depth",
        "entered_at",
        "gate",
        "ident",
        "insists",
        "is_doomed",
        "is_idle",
        "is_queued",
        "num_polls",
        "number",
        "operation",
        "origin",
        "polled_at",
        "polls",
        "rank",
        "thread",
        "turn",
    )

    def __init__(
        self,
        rank: int,
        number: int,
        body: Callable[[], None],
        origin: str,
        leave: Callable[[Task], None],
    ) -> None:
        self.rank = rank
        self.number = number
        """0 for a rank's own task, then one for each of its lanes."""
        self.origin = origin
        """Where the program started it, for a task beside a rank's own; empty for that."""
        self.awaits: Work[object] | None = None
        self.deadline = math.inf
        self.insists = False
        """Whether the program itself gave the deadline, instead of leaving it at the default."""
        self.is_idle = False
        self.is_doomed = False
        """Whether it is to leave."""
        self.depth = 0
        """How many calls into the library it is in, during which no code of the program runs."""
        self.entered_at = 0.0
        """When it entered the first of these calls."""
        self.operation = ""
        """The collective that it is in, if it is in one."""
        self.ident = 0
        """Of the thread, once it runs."""
        self.gate = threading.Lock()
        self.gate.acquire()
        self.turn = 0
        """Counts its turns; an event for an earlier one is stale."""
        self.is_queued = False
        """Whether its next turn is in the queue."""
        self.polls = False
        """Whether it waits because it looked too often."""
        self.polled_at = -1.0
        """When it last looked whether something is done, and how often at that instant."""
        self.num_polls = 0
        self._body = body
        self._leave = leave
        name = f"simulated rank {rank}" + (f", lane {number}" if number else "")
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self.gate.acquire()
        self.ident = get_ident()
        self.begin_turn()
        try:
            if not self.is_doomed:
                self._body()
        except Ended:
            pass
        finally:
            self._leave(self)

    def forget(self) -> None:
        """Lets go of what it runs, after its end."""
        self._body = _nothing

    def begin_turn(self) -> None:
        """Makes all events for earlier turns stale."""
        self.turn += 1
        self.is_queued = False


def _nothing() -> None: ...
