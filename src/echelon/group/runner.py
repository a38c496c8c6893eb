"""Runner of a group's collectives on one rank: numbers them, runs them, and revokes the group if one fails.

Strategy. A collective takes the next sequence number of its group in the caller's thread. So ranks that make the same
calls in the same order meet, independent of asynchronous operations in flight. Blocking collectives run in the caller's
thread, asynchronous ones in the group's own lane. If a collective fails on one rank, the group is revoked on all ranks,
so no rank waits for a rank that has given up.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from echelon.backends.base import Backend
from echelon.backends.memory import is_ordinary
from echelon.backends.modes import announce_changes
from echelon.backends.native import Call
from echelon.backends.operators import Operator, operator
from echelon.backends.work import Work
from echelon.collectives.calls.hang_diagnosis import ANSWER_SECONDS, HangDiagnosis
from echelon.collectives.calls.operations import Operation, write_out
from echelon.collectives.calls.run import Channel
from echelon.collectives.plans.select import Selector
from echelon.errors import Closed, CollectiveMismatch, PeerFailed, SizeMismatch, Timeout, failure_of, without_frames
from echelon.operation_records import OperationRecord

T = TypeVar("T")

_MAX_KNOWN = 256
# A wait may end this much before the collective that it waits for, if both began with the same timeout.
_SLACK_SECONDS = 1.0


class Known(NamedTuple):
    """Validated all-reduce, for the fast path."""

    note: str
    operator: Operator
    num_bytes: int


class CollectiveRunner:
    """Runner of one group's collectives on one rank."""

    def __init__(self, backend: Backend, ranks: Sequence[int], context: int, name: str, selector: Selector) -> None:
        """Starts at operation 1.

        Args:
            backend: Transport of the messages.
            ranks: The backend's rank of each member.
            context: Number that separates this group's messages from those of other groups.
            name: Name of the group in errors.
            selector: Selector of the algorithms.
        """
        self._backend = backend
        self._ranks = ranks
        self._rank = ranks.index(backend.rank)
        self._context = context
        self._name = name
        self._selector = selector
        self._native = backend.native_collectives(context, ranks)
        backend.control.join(context, ranks)
        # Guards the sequence number, signature and marks, which must advance together. Held for no other work.
        self._numbering = threading.Lock()
        self._sequence = 0
        # Begins with the members, so ranks that made the group with other members differ from its first operation on.
        self._signature = zlib.crc32(repr(list(ranks)).encode())
        self._marks: tuple[str, ...] = ()
        # Errors of asynchronous operations that nobody has waited for yet, by sequence number; `close` raises them.
        self._unseen: dict[int, Exception] = {}
        self._known: dict[tuple[str, torch.Size, torch.dtype], Known] = {}

    def all_reduce_known(self, tensor: Tensor, op: str, timeout: float) -> bool:
        """Fast path: runs an all-reduce whose arguments an earlier call validated. False if there was none.

        Args:
            tensor: Combined in place. May be anything: a value that is no ordinary tensor gives False.
            op: The reduction.
            timeout: As in `call`.

        Raises:
            CollectiveMismatch, PeerFailed, Timeout, Closed: As in `call`.
        """
        # Small all-reduces are called over and over, so this skips the checks and the `Operation` of `call`.
        native = self._native
        if native is None or not isinstance(op, str) or not is_ordinary(tensor):
            return False
        if torch.is_inference_mode_enabled() or tensor.is_inference():
            return False
        known = self._known.get((op, tensor.shape, tensor.dtype))
        if known is None:
            return False
        increment_version(tensor)
        flight = self._begin(known.note, known.num_bytes)
        # It runs at once in the caller's thread, so one look at the clock is enough for both times.
        flight.begun = flight.started
        watch = HangDiagnosis(self._backend, self._ranks, flight, flight.started)
        call = Call(flight.sequence, known.note, flight.signature, flight.started + timeout, watch)
        try:
            native.all_reduce(call, tensor, known.operator)
        except (Exception, KeyboardInterrupt) as error:
            self._fail(error, watch, flight)
        flight.end()
        return True

    def know_all_reduce(self, tensor: Tensor, op: str, note: str) -> None:
        """Remembers validated arguments, so later calls skip validation."""
        if self._native is not None and is_ordinary(tensor):
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[op, tensor.shape, tensor.dtype] = Known(note, operator(op, tensor.dtype), tensor.nbytes)

    def call(
        self,
        operation: Operation[T],
        async_op: bool,
        timeout: float,
        out: Tensor | None = None,
        changes: Sequence[Tensor] = (),
    ) -> T | Work[T]:
        """Runs a collective here, or with `async_op` in the group's lane. If it fails, it fails on all ranks.

        Args:
            operation: The collective.
            async_op: Return a Work at once.
            timeout: Seconds for the whole operation, from its start.
            out: Overwritten with the result and returned. None: the result itself is returned.
            changes: Other tensors of the user that the operation overwrites.

        Raises:
            RuntimeError: torch does not allow a tensor to be overwritten. Nothing was sent, and the group stays usable.
            CollectiveMismatch, PeerFailed, Timeout, Closed: it could not be finished, and the group is revoked.
            SizeMismatch: `out` does not fit the result. The group stays usable.
        """
        # Before the operation takes a number: an error of torch here must not leave the ranks out of step.
        if out is not None:
            changes = (*changes, out)
        if changes:
            announce_changes(changes)
        flight = self._begin(operation.note, operation.num_bytes)
        if not async_op:
            if not torch.is_inference_mode_enabled():
                return self._run(operation, flight, timeout, out)
            # Scratch tensors made in inference mode could not be used outside of it.
            with torch.inference_mode(False):
                return self._run(operation, flight, timeout, out)
        attempt: Callable[[], T] = partial(self._run, operation, flight, timeout, out)
        aside = self._backend.aside(self._context)
        if aside is not None:
            attempt = partial(aside.queued, attempt)
        work = self._backend.lanes.start(partial(self._beside, attempt, flight), str(flight), self._context)
        work.overwrites(changes)
        if aside is not None:
            work.when_taken(aside.join)
        work.when_seen(lambda: self._unseen.pop(flight.sequence, None))
        work.lateness = Lateness(self._backend, self._ranks, timeout, lambda: flight)
        return work

    @property
    def is_native(self) -> bool:
        """Whether the backend runs collectives itself, not by messages of a plan."""
        return self._native is not None

    def mark(self, note: str) -> None:
        """Adds a call without messages, which all ranks must make as well, to the signature."""
        # The next collective compares the signature, so a rank that left out the call is found then.
        with self._numbering:
            self._signature = zlib.crc32(note.encode(), self._signature)
            self._marks += (note,)

    def check_seen(self) -> None:
        """Raises the error of the first failed asynchronous operation that nobody has waited for. Else does nothing."""
        for sequence in sorted(self._unseen):
            raise self._unseen.pop(sequence)

    def _begin(self, note: str, num_bytes: int) -> OperationRecord:
        with self._numbering:
            self._sequence += 1
            # The signature is a checksum of all calls so far, so a difference shows in every later operation too.
            self._signature = signature = zlib.crc32(note.encode(), self._signature)
            marks, self._marks = self._marks, ()
            return self._backend.flight_recorder.begin(
                self._name, self._context, self._sequence, signature, note, num_bytes, marks
            )

    def _run(self, operation: Operation[T], flight: OperationRecord, timeout: float, out: Tensor | None) -> T:
        backend = self._backend
        flight.begun = begun = backend.now()
        watch = HangDiagnosis(backend, self._ranks, flight, begun)
        call = Call(flight.sequence, flight.operation, flight.signature, begun + timeout, watch)
        try:
            # Without no_grad, which costs 1.5 us to enter: native collectives get detached tensors only.
            if self._native is not None:
                result = operation.native(self._native, call)
            else:
                with torch.no_grad():
                    result = operation.act(self._channel(call, watch))
        except (Exception, KeyboardInterrupt) as error:
            self._fail(error, watch, flight)
        # Ended before the result is written: an `out` that does not fit is an error of this rank alone.
        flight.end()
        return result if out is None else cast("T", write_out(out, cast("Tensor", result), operation.note))

    def _fail(self, error: BaseException, watch: HangDiagnosis, flight: OperationRecord) -> NoReturn:
        """Ends an operation on all ranks and raises the reason."""
        told = self._give_up(error, watch, f"rank {self._backend.rank} in {flight}")
        flight.end(told)
        if told is error:
            raise error
        raise told from without_frames(error)

    def _channel(self, call: Call, watch: HangDiagnosis) -> Channel:
        return Channel(
            self._backend,
            self._ranks,
            self._rank,
            self._context,
            call.sequence,
            call.note,
            call.deadline,
            self._selector,
            watch,
        )

    def _beside(self, attempt: Callable[[], T], flight: OperationRecord) -> T:
        try:
            return attempt()
        except Closed as error:
            # The backend's error does not know which operation it ended.
            closed = Closed(f"{flight} was still under way when rank {self._backend.rank} closed: wait for it before")
            self._unseen[flight.sequence] = closed
            raise closed from error
        except Exception as error:
            self._unseen[flight.sequence] = error
            raise

    def _give_up(self, error: BaseException, watch: HangDiagnosis, operation: str) -> BaseException:
        """Revokes the group on all ranks and returns the error to raise on this rank."""
        # This rank has closed its backend itself, so there is nothing to revoke over.
        if isinstance(error, Closed):
            return error
        told = _explained(error, watch, operation)
        # To other ranks, any other error is a failure of this rank.
        failure = told
        if not isinstance(failure, PeerFailed | CollectiveMismatch):
            failure = failure_of(told, self._backend.rank)
        first = self._backend.control.revoke(self._context, self._ranks, failure)
        # The first cause on any rank explains more than a PeerFailed here, which may be its consequence.
        if isinstance(first, CollectiveMismatch) or isinstance(told, PeerFailed):
            return first.noticed_by(operation)
        return told


class Lateness:
    """Diagnosis of late work in a group's lane: a collective, or a job that calls collectives."""

    __slots__ = ("_backend", "_find", "_ranks", "_timeout")

    def __init__(
        self, backend: Backend, ranks: Sequence[int], timeout: float, find: Callable[[], OperationRecord | None]
    ) -> None:
        """Describes the work.

        Args:
            backend: The group's backend.
            ranks: The backend's rank of each member.
            timeout: Timeout of a collective, in seconds.
            find: Returns the collective that the work waits for. None if it waits for none.
        """
        self._backend = backend
        self._find = find
        self._ranks = ranks
        self._timeout = timeout

    def patience(self) -> float:
        """Returns the seconds that the collective needs to fail by itself.

        0 if it has not begun, or if its timeout is more than 1 s away.
        """
        # Its own error says more than that of the wait: it has queried all ranks.
        flight = self._find()
        begun = None if flight is None else flight.begun
        if begun is None:
            return 0.0
        left = begun + self._timeout - self._backend.now()
        return left + ANSWER_SECONDS + _SLACK_SECONDS if left < _SLACK_SECONDS else 0.0

    def describe_peers(self, seconds: float) -> Timeout:
        """Queries all ranks of the group and returns an error that describes them. Blocks for at most 2 s."""
        flight = self._find()
        if flight is None:
            return Timeout("no collective of this work is under way")
        begun = flight.started if flight.begun is None else flight.begun
        try:
            return HangDiagnosis(self._backend, self._ranks, flight, begun).timeout(min(seconds, ANSWER_SECONDS))
        except CollectiveMismatch as mismatch:
            return Timeout(str(mismatch))


def _explained(error: BaseException, watch: HangDiagnosis, operation: str) -> BaseException:
    """Returns an error with the facts that are known of the other ranks."""
    # A timeout may turn out to be a mismatch, which is then the better explanation.
    try:
        if isinstance(error, Timeout):
            late = watch.timeout()
            return Timeout(f"{operation}: {late}", late.ranks)
    except CollectiveMismatch as mismatch:
        return mismatch
    if isinstance(error, CollectiveMismatch) and error.rank is not None:
        return watch.disagreement(error.rank, error.theirs, str(error))
    if isinstance(error, SizeMismatch):
        return CollectiveMismatch(f"{operation}: {error}")
    if isinstance(error, PeerFailed) and error.has_closed:
        return watch.departure(error)
    return error
