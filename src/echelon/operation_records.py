"""Flight recorder: the last operations of one rank, with name, line, time and outcome.

Strategy. An operation is one small object in a ring of the last 1000. Slow facts, such as the line of the program, are
computed on demand. No lock: a thread writes only to its own operations, and the methods of deque are atomic.
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
"""Number of operations that the ring holds."""
VARIABLE = "ECHELON_FLIGHT_RECORDER"
"""Names a folder: a rank that fails writes its records there."""

TUNED_TABLE = "tuned table"
"""The group over which `echelon.init` agrees on a table of algorithms, before the user's first group exists."""
_INTERNAL_GROUPS = frozenset({TUNED_TABLE})
"""Groups that users do not see: their operations are part of `echelon.init`."""

_OWN_CALLS = 4
"""Frames from `calling_place` up to the group's method: itself, a helper, `begin`, `OperationRecord`."""

State = Literal["under way", "done", "failed"]


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """Operation of this rank, as a value."""

    group: str
    """Name of the group."""
    sequence: int
    """Number of the collective in its group; 0 for point-to-point messages."""
    operation: str
    """Name, dtype and shape: "all_reduce(sum) of float32[10]"."""
    num_bytes: int
    """Bytes of this rank's tensor; 0 if it has none, or nothing has arrived yet."""
    place: str
    """Call site in the user's code, as "file:line"; empty if there is none."""
    started: float
    """Time of the call, in seconds of `time.monotonic`; virtual seconds on a simulated rank."""
    ended: float | None
    """Time of the end; None: in flight."""
    state: State
    error: str
    """Type and text of the exception, if the operation failed."""

    def __str__(self) -> str:
        number = f", #{self.sequence}" if self.sequence else ""
        end = "" if self.ended is None else f" for {self.ended - self.started:.6f} s"
        error = f": {self.error}" if self.error else ""
        return f"{self.operation}{number} of group {self.group!r} at {self.place}, {self.state}{end}{error}"


class OperationRecord:
    """Entry of the flight recorder, updated while its operation is in flight."""

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
        """Checksum of a collective and all calls before it: equal on ranks that made the same calls."""
        self.operation = operation
        self.num_bytes = num_bytes
        self.marks = marks
        """Calls since the previous collective that sent nothing to other ranks."""
        self.place: Place | None = calling_place(_OWN_CALLS)
        self.thread = get_ident()
        self.started = clock()
        self.begun: float | None = None
        """Time when a queued collective began to run; None: it has not begun."""
        self.ended: float | None = None
        self.error = ""

    @property
    def is_internal(self) -> bool:
        """Whether the operation is part of `echelon.init`, not a call of the user."""
        return self.group in _INTERNAL_GROUPS

    def got(self, what: str, num_bytes: int) -> None:
        """Adds dtype, shape and bytes of a received message."""
        self.operation += f" of {what}"
        self.num_bytes = num_bytes

    def end(self, error: BaseException | None = None) -> None:
        """Marks the operation as ended, failed if `error` is given."""
        if error is not None:
            self.error = f"{type(error).__name__}: {error}"
        self.ended = self._clock()  # last: a reader in another thread that sees the end sees the error too

    def record(self) -> FlightRecord:
        """Returns a snapshot of the operation."""
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
        """Returns the operation as text, with everything that two ranks compare."""
        return f"{self} after {', '.join(self.marks)}" if self.marks else str(self)

    def __str__(self) -> str:
        number = f", #{self.sequence}" if self.sequence else ""
        where = line_of(self.place)
        if self.is_internal:
            return "echelon.init" + (f" at {where}" if where else "")
        return f"{self.operation}{number} of group {self.group!r}" + (f" at {where}" if where else "")


class FlightRecorder:
    """Ring of the last operations of one rank."""

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
        """Adds an operation that the calling thread begins now. The caller ends it with `OperationRecord.end`.

        Args:
            group: name of the group.
            context: context of the group.
            sequence: number of the collective; 0 for a message.
            signature: checksum of the collective, see `OperationRecord`.
            operation: the text that ranks compare, with shape and dtype.
            num_bytes: bytes of this rank's tensor.
            marks: see `OperationRecord`.
        """
        flight = OperationRecord(self._clock, group, context, sequence, signature, operation, num_bytes, marks)
        self._flights.append(flight)
        if sequence:
            self._latest[context] = flight
        return flight

    def records(self) -> tuple[FlightRecord, ...]:
        """Returns the recorded operations of the user, the oldest first."""
        # A copy: iterating a deque fails while another thread appends.
        return tuple(flight.record() for flight in self._flights.copy() if not flight.is_internal)

    def latest(self, context: int) -> OperationRecord | None:
        """Returns the last collective called on a group. None if there was none."""
        return self._latest.get(context)

    def find(self, context: int, sequence: int) -> OperationRecord | None:
        """Returns a collective by its number. None if it was not called yet, or has left the ring."""
        flights = reversed(self._flights.copy())
        return next((flight for flight in flights if flight.context == context and flight.sequence == sequence), None)

    def under_way(self) -> list[OperationRecord]:
        """Returns the operations in flight, the oldest first."""
        return [flight for flight in self._flights.copy() if flight.ended is None]

    def activity(self) -> str:
        """Describes the current activity of this rank, as the end of a sentence about it."""
        if under_way := self.under_way():
            return f"in {' and '.join(map(str, under_way[-2:]))}"
        if not self._flights:
            return "before its first operation"
        last = self._flights[-1]
        now = line_of(place_of_thread(last.thread))
        past = "before its first operation" if last.is_internal else f"past {last}"
        return f"{past}, " + (f"now at {now}" if now else "at the end of its program")


def write_records(recorder: FlightRecorder, rank: int) -> None:
    """Writes the records of a failing rank to rank-<rank>.jsonl, if ECHELON_FLIGHT_RECORDER names a folder.

    One JSON object a line; overwrites the file. Never raises, since the failure itself matters more.
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
