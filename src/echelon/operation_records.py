"""The last operations of one rank, as data: what it called, where, when, and how that ended.

Strategy. An operation is one small object in a ring of the last thousand. What costs time, such as the line of the
program, is worked out when somebody asks. No lock: a thread writes only to its own operations, and the ring's own
methods are atomic.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Literal

from echelon.call_site import Place, calling_place, line_of, place_of_thread

CAPACITY = 1000
"""How many operations are remembered."""
VARIABLE = "ECHELON_FLIGHT_RECORDER"
"""Names a folder: a rank that fails writes its records there."""

TUNED_TABLE = "tuned table"
"""The group over which `echelon.init` agrees on a table of algorithms, before the user's first group exists."""
_INTERNAL_GROUPS = frozenset({TUNED_TABLE})
"""Groups of which users know nothing: their operations are part of `echelon.init`."""

_OWN_CALLS = 4
"""Frames from `calling_place` up to the group's method: itself, a helper, `begin`, `OperationRecord`."""

State = Literal["under way", "done", "failed"]


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """One operation of this rank."""

    group: str
    """The name of the group."""
    sequence: int
    """Its number among the collectives of the group; 0 for messages between two ranks."""
    operation: str
    """What was called, on which shape and dtype: "all_reduce(sum) of float32[10]"."""
    num_bytes: int
    """Of this rank's tensor; 0 where it has none, or nothing has come yet."""
    place: str
    """The user's line, as "file:line"; empty if there is none."""
    started: float
    """When it was called, in seconds of `time.monotonic`; of a simulated rank, virtual ones."""
    ended: float | None
    """None: under way."""
    state: State
    error: str
    """Of an operation that failed: type and text."""

    def __str__(self) -> str:
        number = f", #{self.sequence}" if self.sequence else ""
        end = "" if self.ended is None else f" for {self.ended - self.started:.6f} s"
        error = f": {self.error}" if self.error else ""
        return f"{self.operation}{number} of group {self.group!r} at {self.place}, {self.state}{end}{error}"


class OperationRecord:
    """One operation while it may still change."""

    __slots__ = (
        "_clock",
        "begun",
        "context",
        "ended",
        "error",
        "group",
        "marks",
        "num_bytes",
        "operation",
        "place",
        "sequence",
        "signature",
        "started",
        "thread",
    )

    def __init__(
        self,
        clock: Callable[[], float],
        group: str,
        context: int,
        sequence: int,
        signature: int,
        operation: str,
        num_bytes: int,
        marks: tuple[str, ...],
    ) -> None:
        self._clock = clock
        self.group = group
        self.context = context
        self.sequence = sequence
        self.signature = signature
        """Of a collective: equal on two ranks if they have made the same calls up to here."""
        self.operation = operation
        self.num_bytes = num_bytes
        self.marks = marks
        """What was called since the collective before without saying anything to the other ranks."""
        self.place: Place | None = calling_place(_OWN_CALLS)
        self.thread = get_ident()
        self.started = clock()
        self.begun: float | None = None
        """When it began to run, of a collective that may have to wait for its turn first; None: it has not begun."""
        self.ended: float | None = None
        self.error = ""

    @property
    def is_internal(self) -> bool:
        """Whether the user did not call it: it is part of `echelon.init`."""
        return self.group in _INTERNAL_GROUPS

    def got(self, what: str, num_bytes: int) -> None:
        """Says which shape and dtype came, and how many bytes."""
        self.operation += f" of {what}"
        self.num_bytes = num_bytes

    def end(self, error: BaseException | None = None) -> None:
        """Says that the operation is over."""
        if error is not None:
            self.error = f"{type(error).__name__}: {error}"
        self.ended = self._clock()

    def record(self) -> FlightRecord:
        """Returns the operation as it is now."""
        ended, error = self.ended, self.error
        return FlightRecord(
            group=self.group,
            sequence=self.sequence,
            operation=self.operation,
            num_bytes=self.num_bytes,
            place=line_of(self.place),
            started=self.started,
            ended=ended,
            state="under way" if ended is None else "failed" if error else "done",
            error=error,
        )

    def with_marks(self) -> str:
        """Returns it as text, with all that two ranks compare."""
        return f"{self} after {', '.join(self.marks)}" if self.marks else str(self)

    def __str__(self) -> str:
        number = f", #{self.sequence}" if self.sequence else ""
        where = line_of(self.place)
        if self.is_internal:
            return "echelon.init" + (f" at {where}" if where else "")
        return f"{self.operation}{number} of group {self.group!r}" + (f" at {where}" if where else "")


class FlightRecorder:
    """Remembers the last operations of one rank."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._flights: deque[OperationRecord] = deque(maxlen=CAPACITY)
        self._latest: dict[int, OperationRecord] = {}

    def begin(
        self,
        group: str,
        context: int,
        sequence: int,
        signature: int,
        operation: str,
        num_bytes: int = 0,
        marks: tuple[str, ...] = (),
    ) -> OperationRecord:
        """Adds an operation that the calling thread begins now; whoever ends it says so.

        Args:
            group: name of the group.
            context: of the group.
            sequence: number of the collective; 0 for a message.
            signature: of the collective, see `OperationRecord`.
            operation: what ranks compare, with shape and dtype.
            num_bytes: of this rank's tensor.
            marks: see `OperationRecord`.
        """
        flight = OperationRecord(self._clock, group, context, sequence, signature, operation, num_bytes, marks)
        self._flights.append(flight)
        if sequence:
            self._latest[context] = flight
        return flight

    def records(self) -> tuple[FlightRecord, ...]:
        """Returns what is remembered of the user's operations, the oldest first."""
        return tuple(flight.record() for flight in self._flights.copy() if not flight.is_internal)

    def latest(self, context: int) -> OperationRecord | None:
        """Returns the collective of a group that was called last."""
        return self._latest.get(context)

    def find(self, context: int, sequence: int) -> OperationRecord | None:
        """Returns a collective; None if it was not called yet, or is forgotten."""
        flights = reversed(self._flights.copy())
        return next((flight for flight in flights if flight.context == context and flight.sequence == sequence), None)

    def under_way(self) -> list[OperationRecord]:
        """Returns the operations that have not ended, the oldest first."""
        return [flight for flight in self._flights.copy() if flight.ended is None]

    def activity(self) -> str:
        """Says what this rank is doing now, as the end of a sentence about it."""
        if under_way := self.under_way():
            return f"in {' and '.join(map(str, under_way[-2:]))}"
        if not self._flights:
            return "before its first operation"
        last = self._flights[-1]
        now = line_of(place_of_thread(last.thread))
        past = "before its first operation" if last.is_internal else f"past {last}"
        return f"{past}, " + (f"now at {now}" if now else "at the end of its program")


def write_records(recorder: FlightRecorder, rank: int) -> None:
    """Writes the records of a rank that fails, one JSON object a line, to rank-<rank>.jsonl in the folder that
    ECHELON_FLIGHT_RECORDER names, if it does. Overwrites what is there. Never raises: the failure itself matters more.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"rank-{rank}.jsonl"), "w", encoding="utf-8") as file:
            file.writelines(json.dumps(dataclasses.asdict(record)) + "\n" for record in recorder.records())
    except OSError:
        pass
