"""Flight recorder: the last operations of one rank, with name, line, time and outcome.

Strategy. An operation is one small object in a ring of the last 1000, and stays beyond it while it is in flight. Slow
facts, such as the line of the program, are computed on demand. No lock: a thread writes only to its own operations, and
the methods of deque and dict are atomic.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from types import CodeType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from echelon._native import OBSTACLE, Flights
from echelon.call_site import OF_FSDP2, Place, kind_of, line_of, place_of_thread, sharded_module
from echelon.errors import with_type
from echelon.purposes import Purpose

if TYPE_CHECKING:
    from echelon.backends.work import Work

CAPACITY = 1000
"""Number of operations that the ring holds."""
VARIABLE = "ECHELON_FLIGHT_RECORDER"
"""Names a folder: a rank that fails writes its records there."""

TUNED_TABLE = "tuned table"
"""The group over which `echelon.init` agrees on a table of algorithms, before the user's first group exists."""
_INTERNAL_GROUPS = frozenset({TUNED_TABLE})
"""Groups that users do not see: their operations are part of `echelon.init`."""

CALLED_FROM = ", called from "
"""Words before the line of a caller in the text of an operation."""

State = Literal["under way", "done", "failed"]


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """Operation of this rank, as a value."""

    group: str
    """Name of the user's group, also of operations in a group that the library has made from it."""
    sequence: int
    """Number of the collective in its group; 0 for point-to-point messages."""
    operation: str
    """Name, dtype and shape: "all_reduce(sum) of float32[10]"."""
    num_bytes: int
    """Bytes of this rank's tensor; 0 if it has none, or nothing has arrived yet."""
    place: str
    """Call site in the user's code, as `call_site.line_of` tells it; empty if there is none."""
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


class LivenessCheck(Protocol):
    """Diagnosis of a pending collective: queries the rank that it waits for."""

    @property
    def next_check_at(self) -> float:
        """Time of the next check, in the backend's time."""
        ...

    def look(self, peer: int, has_come: Callable[[], bool]) -> None:
        """Queries a rank. Raises CollectiveMismatch if it will never make the awaited call."""
        ...

    def blocks_for(self) -> int | None:
        """Returns the rank that has to take part in the collective before the program makes another call.

        None if another call may come before.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class KnownOperation:
    """Facts of a collective that the native library records. Two of them are never equal."""

    group: str
    context: int
    operation: str
    """Text that ranks compare."""
    num_bytes: int


class OperationRecord:
    """Entry of the flight recorder, updated while its operation is in flight. `FlightRecorder.begin` makes it.

    A collective's record goes to the executor as the call itself.
    """

    __slots__ = (
        "_clock",
        "begun",
        "caller",
        "context",
        "deadline",
        "ended",
        "error",
        "group",
        "marks",
        "num_bytes",
        "operation",
        "place",
        "purpose",
        "sequence",
        "signature",
        "started",
        "thread",
        "watch",
        "watched_by",
    )
    _clock: Callable[[], float]
    watch: LivenessCheck | None
    """The `lookout`, once it was made."""
    group: str
    context: int
    sequence: int
    """Number of a collective in its group, from 1 on, the same on all ranks. 0 for a message."""
    signature: int
    """Checksum of a collective and all calls before it: equal on ranks that made the same calls."""
    operation: str
    """Text that ranks compare."""
    num_bytes: int
    marks: tuple[str, ...]
    """Calls since the previous collective that sent nothing to other ranks."""
    place: Place | None
    caller: Place | None
    """Call site that led to a function of the program which made the call. None if a module or the library called it,
    or if it is not known."""
    purpose: Purpose | None
    """The user's call that the operation is a part of. None if it is that call itself."""
    thread: int
    started: float
    begun: float | None
    """Time when a queued collective began to run; None: it has not begun."""
    deadline: float
    """End of a collective's time, in the backend's time."""
    ended: float | None
    error: str
    watched_by: Callable[[OperationRecord], LivenessCheck] | None
    """Makes `lookout`."""

    @property
    def lookout(self) -> LivenessCheck:
        """Diagnosis of this collective. Made by the first long wait, because most calls never wait long."""
        if self.watch is None:
            assert self.watched_by is not None, "a collective in flight"
            self.watch = self.watched_by(self)
        return self.watch

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
            self.error = with_type(error)
        self.ended = self._clock()  # last: a reader in another thread that sees the end sees the error too

    def record(self) -> FlightRecord:
        """Returns a snapshot of the operation."""
        ended, error = self.ended, self.error
        return FlightRecord(
            group=self.shown_group,
            sequence=self.sequence,
            operation=self.operation if self.purpose is None else f"{self.purpose} ({self.operation})",
            num_bytes=self.num_bytes,
            place=line_of(self.place),
            started=self.started,
            ended=ended,
            state="under way" if ended is None else "failed" if error else "done",
            error=error,
        )

    def with_marks(self) -> str:
        """Returns the operation as text, with everything that two ranks compare."""
        call = self.call if self.purpose is None else f"{self.call} ({self._numbered()})"
        return self._placed(call) + (f" after {', '.join(self.marks)}" if self.marks else "")

    def __str__(self) -> str:
        return self._placed(self.call)

    @property
    def call(self) -> str:
        """The user's call: that of which the operation is a part, else the operation with its number."""
        return self._numbered() if self.purpose is None else str(self.purpose)

    @property
    def call_of_group(self) -> str:
        """The user's call, with the group."""
        return "echelon.init" if self.is_internal else f"{self.call} of group {self.shown_group!r}"

    @property
    def shown_group(self) -> str:
        """Name of the user's group."""
        return (self.purpose is not None and self.purpose.group) or self.group

    def _numbered(self) -> str:
        return self.operation + (f", #{self.sequence}" if self.sequence else "")

    def _placed(self, call: str) -> str:
        where = line_of(self.place)
        if self.is_internal:
            return self.call_of_group + (f" at {where}" if where else "")
        return f"{call} of group {self.shown_group!r}" + (f" at {where}{self.called_from()}" if where else "")

    def called_from(self) -> str:
        """Returns ", called from file:line" for the caller. Empty if there is none, or the line is that of the call."""
        # Two ranks may differ there alone, where a helper of the program communicates.
        line = line_of(self.caller)
        # Python 3.11 has a frame of its own for a list comprehension.
        return "" if not line or line == line_of(self.place) else f"{CALLED_FROM}{line}"


class MessageWait(NamedTuple):
    """Wait of a program for a message, without a timeout of its own."""

    number: int
    """Another one for each wait of the rank."""
    thread: int
    peer: int
    """The awaited rank."""
    receive: Work[Any]
    text: str
    """The operation, with the user's line."""


class FlightRecorder:
    """Ring of the last operations of one rank."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        """Returns the time, in seconds."""
        self._flights: deque[OperationRecord] = deque()
        # Pushed out of the ring while they were in flight. Those that have ended since are dropped now and then.
        self._pushed_out: dict[int, OperationRecord] = {}
        self._most_pushed_out = CAPACITY
        self._latest: dict[int, OperationRecord] = {}
        self._ring: Flights | None = None
        self._latest_native: dict[int, Flights] = {}
        self._purposes: dict[int, Purpose] = {}
        """By context, of groups that the library made for itself."""
        self._calls: dict[int, Purpose] = {}
        """By thread."""
        self.message_wait: MessageWait | None = None
        """Wait of the main thread for a message, once it is long."""

    def rings(self, context: int) -> tuple[Flights, Flights] | None:
        """Returns the rings of the operations that the native library runs, for a new group.

        The first has the last ones of all groups. The second has the last collective of this group, however many those
        of others are. None if the library's times would not fit these records.
        """
        if self.clock is not time.monotonic or OBSTACLE:
            return None
        if self._ring is None:
            self._ring = Flights(CAPACITY)
        latest = self._latest_native[context] = Flights(1)
        return self._ring, latest

    def serve(self, context: int, purpose: Purpose) -> None:
        """Sets the purpose of a group that the library made for itself, for its operations from now on."""
        self._purposes[context] = purpose

    @contextmanager
    def within(self, call: str, step: int = 0) -> Iterator[None]:
        """Inside, operations of this thread are a part of a call of the user, which errors name in their place.

        Inside of another such call it does nothing, since that one is the user's. `step` is as in `Purpose`.
        """
        thread = get_ident()
        if thread in self._calls:
            yield
            return
        self._calls[thread] = Purpose(call, step=step)
        try:
            yield
        finally:
            del self._calls[thread]

    def purpose_of_thread(self) -> str:
        """Returns the call of the user that `within` has noted for this thread. Empty if there is none."""
        purpose = self._calls.get(get_ident())
        return "" if purpose is None else purpose.call

    def begin(
        self,
        group: str,
        context: int,
        sequence: int,
        signature: int,
        operation: str,
        num_bytes: int = 0,
        marks: tuple[str, ...] = (),
        watched_by: Callable[[OperationRecord], LivenessCheck] | None = None,
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
            watched_by: makes the collective's `lookout`. None for a message.
        """
        # Filled in here, and the stack walked here: every operation pays for each further call of a function.
        record = OperationRecord.__new__(OperationRecord)
        record._clock = clock = self.clock
        record.watch = None
        record.watched_by = watched_by
        record.group, record.context, record.sequence, record.signature = group, context, sequence, signature
        record.operation, record.num_bytes, record.marks = operation, num_bytes, marks
        frame = sys._getframe(2)  # begin's caller and its caller are ours
        record.caller = None
        module = ""
        while kind := kind_of(frame.f_code.co_filename):
            if kind == OF_FSDP2 and not module:
                module = sharded_module(frame)
            if frame.f_back is None:
                record.place = None
                break
            frame = frame.f_back
        else:
            record.place = frame.f_code, frame.f_lasti, module
            caller = frame.f_back
            if caller is not None and not kind_of(caller.f_code.co_filename):
                names = frame.f_code.co_name, caller.f_code.co_name
                record.caller = None if "<module>" in names else (caller.f_code, caller.f_lasti, "")
        record.thread = thread = get_ident()
        record.purpose = self._purpose_of(context, thread) if self._purposes or self._calls else None
        record.begun = record.ended = None
        record.error = ""
        record.started = clock()
        self._flights.append(record)
        if len(self._flights) > CAPACITY and (oldest := self._flights.popleft()).ended is None:
            self._push_out(oldest)
        if sequence:
            self._latest[context] = record
        return record

    def _purpose_of(self, context: int, thread: int) -> Purpose | None:
        own, call = self._purposes.get(context), self._calls.get(thread)
        return own if call is None else call if own is None else call._replace(group=own.group)

    def _push_out(self, record: OperationRecord) -> None:
        """Keeps a record of an operation in flight, for which the ring has no room."""
        pushed_out = self._pushed_out
        if len(pushed_out) >= self._most_pushed_out:
            for key, each in list(pushed_out.items()):
                if each.ended is not None:
                    pushed_out.pop(key, None)
            # Twice as many, so that a record is looked at a constant number of times on average.
            self._most_pushed_out = 2 * len(pushed_out) + CAPACITY
        pushed_out[id(record)] = record

    def records(self) -> tuple[FlightRecord, ...]:
        """Returns the last operations of the user, and all that are in flight, the oldest first."""
        return tuple(flight.record() for flight in self._all() if not flight.is_internal)

    def last_call(self) -> OperationRecord | None:
        """Returns the last operation of the user. None if there was none."""
        return next((flight for flight in reversed(self._all()) if not flight.is_internal), None)

    def _all(self) -> list[OperationRecord]:
        """Returns the last operations, the native library's included, and all in flight, the oldest first."""
        # Copies: iterating a deque or a dict fails while another thread adds to it.
        flights = [*self._pushed_out.copy().values(), *self._flights.copy()]
        if self._ring is not None and (natives := [self._ended(*entry) for entry in self._ring.entries()]):
            flights = sorted([*flights, *natives], key=lambda flight: flight.started)
        return [*(flight for flight in flights[:-CAPACITY] if flight.ended is None), *flights[-CAPACITY:]]

    def _ended(
        self,
        known: KnownOperation,
        code: CodeType,
        instruction: int,
        sequence: int,
        signature: int,
        thread: int,
        started: float,
        ended: float,
    ) -> OperationRecord:
        """Returns the record of a collective that the native library has begun and ended."""
        record = OperationRecord.__new__(OperationRecord)
        record._clock, record.watch, record.watched_by = self.clock, None, None
        record.group, record.context = known.group, known.context
        record.operation, record.num_bytes = known.operation, known.num_bytes
        record.sequence, record.signature, record.marks = sequence, signature, ()
        own = self._purposes.get(known.context)
        record.purpose = own and own._replace(step=0)
        record.place, record.caller, record.thread, record.error = (code, instruction, ""), None, thread, ""
        record.started = record.begun = started
        record.ended = ended
        return record

    def latest(self, context: int) -> OperationRecord | None:
        """Returns the last collective called on a group. None if there was none."""
        latest, native = self._latest.get(context), self._latest_native.get(context)
        for entry in native.entries() if native is not None else ():
            flight = self._ended(*entry)
            if latest is None or flight.sequence > latest.sequence:
                return flight
        return latest

    def find(self, context: int, sequence: int) -> OperationRecord | None:
        """Returns a collective by its number. None if it was not called yet, or has ended and left the ring."""
        flights = reversed(self._all())
        return next((flight for flight in flights if flight.context == context and flight.sequence == sequence), None)

    def last_calls(self, context: int) -> list[OperationRecord]:
        """Returns the recorded collectives of a group, the newest first."""
        calls = [flight for flight in self._all() if flight.context == context and flight.sequence]
        return sorted(calls, key=lambda flight: -flight.sequence)

    def under_way(self) -> list[OperationRecord]:
        """Returns the operations in flight, the oldest first."""
        flights = (*self._pushed_out.copy().values(), *self._flights.copy())
        return [flight for flight in flights if flight.ended is None]

    def callers(self) -> set[int]:
        """Returns the threads that have called collectives lately."""
        return {flight.thread for flight in self._all() if flight.sequence}

    def activity(self) -> str:
        """Describes the current activity of this rank, as the end of a sentence about it."""
        if under_way := self.under_way():
            return f"in {' and '.join(map(str, under_way[-2:]))}"
        flights = self._all()
        if not flights:
            return "before its first operation"
        last = flights[-1]
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
