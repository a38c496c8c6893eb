"""Runner of a group's collectives on one rank: prepares, numbers and runs them, and revokes the group if one fails.

Strategy. A collective is prepared once: its arguments are checked, and the executor turns it into a function, which is
kept under the arguments. So a later call like it goes straight to its number and its record.

A collective takes the next sequence number of its group in the caller's thread. So ranks that make the same calls in
the same order meet, independent of asynchronous operations in flight. Blocking collectives run in the caller's thread,
asynchronous ones in the group's own lane. If a collective fails on one rank, the group is revoked on all ranks, so no
rank waits for a rank that has given up.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from echelon._native import Calls
from echelon._torch_private.tensors import wraps_new_tensors
from echelon.arguments import check_seconds, named
from echelon.backends.admission import check_mode
from echelon.backends.base import Backend
from echelon.backends.collective import REDUCTIONS, Collective, Run
from echelon.backends.memory import describe, is_ordinary, is_plain
from echelon.backends.modes import announce_changes, outside_autograd, overwrite
from echelon.backends.operators import check_op
from echelon.backends.status import ANSWER_SECONDS
from echelon.backends.work import Work
from echelon.collectives.calls.coalesced import Packed
from echelon.collectives.calls.hang_diagnosis import HangDiagnosis
from echelon.collectives.calls.plan_executor import PlanExecutor, PlannedExecutor
from echelon.collectives.plans.select import Selector
from echelon.errors import (
    Closed,
    CollectiveMismatch,
    InvalidArgument,
    PeerFailed,
    SizeMismatch,
    Timeout,
    failure_of,
    inherited_error,
    without_frames,
)
from echelon.group.staging import Around, admit, nothing
from echelon.operation_records import KnownOperation, OperationRecord

Seconds: TypeAlias = float | None

_MAX_PREPARED = 256
# A wait may end this much before the collective that it waits for, if both began with the same timeout.
_SLACK_SECONDS = 1.0


class Prepared(NamedTuple):
    """Collective that was checked, with the function that runs it."""

    note: str
    checksum: int
    """Of the note, for the signature."""
    num_bytes: int
    run: Run


class CollectiveRunner:
    """Runner of one group's collectives on one rank."""

    def __init__(
        self, backend: Backend, ranks: Sequence[int], context: int, name: str, selector: Selector, timeout: float
    ) -> None:
        """Starts at operation 1.

        Args:
            backend: Transport of the messages.
            ranks: The backend's rank of each member.
            context: Number that separates this group's messages from those of other groups.
            name: Name of the group in errors.
            selector: Selector of the algorithms.
            timeout: Default timeout of a call, in seconds.
        """
        self.timeout = timeout
        self._backend = backend
        self._recorder = backend.flight_recorder
        self._clock = backend.flight_recorder.clock
        self._now = backend.now
        self._ranks = ranks
        self._context = context
        self.name = name
        """Name of the group in errors."""
        self._executor = backend.executor(context, ranks) or PlanExecutor(backend, ranks, context)
        self.is_native = not isinstance(self._executor, PlannedExecutor)
        """Whether the backend runs collectives itself, not by messages of a plan."""
        if isinstance(self._executor, PlannedExecutor):
            self._executor.selector = selector
        backend.control.join(context, ranks)
        self.known = self._executor.known
        """Calls like an earlier one, made without this runner. None if there are none."""
        if self.known is not None:
            self.known.record_into(backend.flight_recorder, context)
        # Guards the sequence number, signature and marks, which must advance together. Held for no other work.
        self._numbering = threading.Lock()
        self._learnt: WeakKeyDictionary[KnownOperation, Prepared] = WeakKeyDictionary()
        self._numbers = Calls() if self.known is None else self.known.numbers
        # Begins with the members, so ranks that made the group with other members differ from its first operation on.
        self._numbers.signature = zlib.crc32(repr(list(ranks)).encode())
        self._marks: tuple[str, ...] = ()
        # Errors of asynchronous operations that nobody has waited for yet, by sequence number; `close` raises them.
        self._unseen: dict[int, Exception] = {}
        self.under_way: set[int] = set()
        """Numbers of the asynchronous operations that have not ended."""
        self._prepared: dict[tuple[object, ...], Prepared] = {}
        # Refers to no group: records outlive theirs.
        self._watched_by = partial(_diagnosis, backend, ranks)
        self._is_closed = False
        # Compared with the current process, to tell a forked child.
        self._process = os.getpid()

    @property
    def is_closed(self) -> bool:
        """Whether the group is closed, or a forked child's copy."""
        return self._is_closed

    @is_closed.setter
    def is_closed(self, value: bool) -> None:
        self._is_closed = value
        self._numbers.is_stopped |= value

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the rank's."""
        return os.getpid() != self._process

    def check_open(self) -> None:
        """Raises Closed if the group is closed, UnsupportedOp inside of FakeTensorMode or a transform of torch.func."""
        if self.is_closed:
            if self.is_inherited:
                raise inherited_error(f"group {self.name!r} of rank {self._backend.rank}", self._process)
            raise Closed(
                f"group {self.name!r} of rank {self._backend.rank} is closed: make a new one with echelon.init()"
            )
        if wraps_new_tensors():
            check_mode(f"group {self.name!r}")

    def prepare(self, collective: Collective) -> Prepared:
        """Returns a collective that is ready to run.

        Raises:
            UnsupportedOp: its reduction has no meaning for its dtype.
        """
        prepared = self._prepared.get(collective)
        if prepared is None:
            note = collective.note
            run = self._executor.prepare(collective)
            prepared = Prepared(note, zlib.crc32(note.encode()), collective.num_bytes, run)
            # Bounded, since a program may use ever new shapes.
            if len(self._prepared) >= _MAX_PREPARED:
                self._prepared.clear()
            self._prepared[collective] = prepared
        return prepared

    def call(
        self,
        kind: str,
        tensor: Tensor | None,
        op: str = "",
        root: int = -1,
        in_splits: tuple[int, ...] | None = None,
        out_splits: tuple[int, ...] | None = None,
        *,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
        writes: bool = False,
        changes: bool = False,
    ) -> Any:
        """Runs a collective here, or with `async_op` in the group's lane. If it fails, it fails on all ranks.

        Args:
            kind, op, root, in_splits, out_splits: As in `Collective`. The group is open, and `root` was checked.
            tensor: This rank's tensor. None if it has none.
            out: Overwritten with the result and returned. None: the result itself is returned.
            async_op: Return a Work at once.
            timeout: Seconds for the whole operation, from its start. None: the group's.
            writes: Whether the collective overwrites `tensor` on this rank.
            changes: Whether autograd is told that `tensor` changes, which holds for all that it overwrites.

        Raises:
            RuntimeError: torch does not allow a tensor to be overwritten. Nothing was sent, and the group stays usable.
            UnsupportedOp: the tensor cannot be moved. Nothing was sent.
            CollectiveMismatch, PeerFailed, Timeout, Closed: it could not be finished, and the group is revoked.
            SizeMismatch: `out` does not fit the result. The group stays usable.
        """
        # Fast path: all that the checks below look at is in the key, or in what `is_ordinary` says.
        if (
            (not wraps_new_tensors() if tensor is None else is_ordinary(tensor))
            and (out is None or is_ordinary(out))
            and isinstance(op, str)
            and not self._is_closed
        ):
            shape, dtype = (None, None) if tensor is None else (tensor.shape, tensor.dtype)
            prepared = self._prepared.get((kind, shape, dtype, op, root, in_splits, out_splits, ""))
            if prepared is not None and async_op is not False:
                changed = [tensor] if tensor is not None and (changes or writes) else []
                return self.start(prepared, tensor, out, async_op, timeout, changed)
            if prepared is not None:
                # Before the operation takes a number: an error here must not leave the ranks out of step.
                seconds = self.timeout if timeout is None else check_seconds(timeout)
                if tensor is not None and (changes or writes):
                    increment_version(tensor)
                if out is not None:
                    increment_version(out)
                record = self._begin(prepared)
                record.begun = record.started
                result = self._run(prepared, record, tensor, out, seconds, None)
                if self.known is not None and in_splits is out_splits is None:
                    known = KnownOperation(self.name, self._context, prepared.note, prepared.num_bytes)
                    if self.known.learn(prepared.run, known, prepared.checksum, (kind, root, op), tensor, out, result):
                        self._learnt[known] = prepared
                return result
        prepared, values, around = self._check(kind, tensor, op, root, in_splits, out_splits, out, writes)
        changed = [tensor] if tensor is not None and (changes or writes) else []
        return self.start(prepared, values, out, async_op, timeout, changed, around)

    def go_on(self, begun: Any, tensor: Tensor | None, out: Tensor | None) -> Any:
        """Goes on with a collective that `run_known` has begun or done. Returns, blocks and raises as `call`.

        Args:
            begun: result of `run_known`.
            tensor, out: its arguments.
        """
        if len(begun) == 1:
            return begun[0]
        known, sequence, signature = begun
        prepared = self._learnt[known]
        record = self._recorder.begin(
            known.group, self._context, sequence, signature, known.operation, known.num_bytes, (), self._watched_by
        )
        record.begun = record.started
        values = None if tensor is None else outside_autograd(tensor)
        if out is not None:
            self._run(prepared, record, values, outside_autograd(out), self.timeout, None)
            return out
        result = self._run(prepared, record, values, None, self.timeout, None)
        return tensor if result is values else result

    def _check(
        self,
        kind: str,
        tensor: Tensor | None,
        op: str,
        root: int,
        in_splits: tuple[int, ...] | None,
        out_splits: tuple[int, ...] | None,
        out: Tensor | None,
        writes: bool,
    ) -> tuple[Prepared, Tensor | None, Around | None]:
        """Checks the tensors of a call. Returns the prepared collective, the tensor for it, and the steps around it."""
        self.check_open()
        values, around = admit(self._backend, kind, tensor, out, writes=writes)
        shape, dtype = (None, None) if values is None else (values.shape, values.dtype)
        name = check_op(op) if kind in REDUCTIONS else ""
        # int: True equals 1 in the key, but is another word in the note.
        collective = Collective(kind, shape, dtype, name, int(root), in_splits, out_splits)
        prepared = self.prepare(collective)
        if name is not op and isinstance(op, str):
            # The same under torch's spelling of the reduction.
            self._prepared[collective._replace(op=op)] = prepared
        return prepared, values, around

    def call_packed(
        self,
        packed: Packed,
        async_op: bool,
        timeout: Seconds,
        changes: Sequence[Tensor] = (),
        around: Around | None = None,
    ) -> Any:
        """Runs a collective that values were packed into; otherwise as `call`.

        Args:
            packed: The collective.
            async_op, timeout: As in `call`.
            changes: The user's tensors that it overwrites.
            around: Steps in place of `unpack`.
        """
        prepared = self.prepare(packed.collective)
        if packed.num_bytes is not None:
            prepared = prepared._replace(num_bytes=packed.num_bytes)
        return self.start(
            prepared, packed.tensor, None, async_op, timeout, changes, around or Around(nothing, packed.unpack)
        )

    def start(
        self,
        prepared: Prepared,
        tensor: Tensor | None,
        out: Tensor | None,
        async_op: bool,
        timeout: Seconds,
        changes: Sequence[Tensor] = (),
        around: Around | None = None,
    ) -> Any:
        """Runs a prepared collective on a tensor that was checked; otherwise as `call`.

        `changes` are the user's tensors that it overwrites beside `out`.
        """
        # In torch's order another argument is in this place, such as the group or an object.
        if not isinstance(async_op, int):
            raise InvalidArgument(f"async_op is {named(async_op)}: give True or False; results are returned")
        timeout = self.timeout if timeout is None else check_seconds(timeout)
        if out is not None:
            changes = (*changes, out)
        if changes:
            announce_changes(changes)
        record = self._begin(prepared)
        if not async_op:
            if not torch.is_inference_mode_enabled():
                return self._run(prepared, record, tensor, out, timeout, around)
            # Scratch tensors made in inference mode could not be used outside of it.
            with torch.inference_mode(False):
                return self._run(prepared, record, tensor, out, timeout, around)
        attempt: Callable[[], Any] = partial(self._run, prepared, record, tensor, out, timeout, around)
        aside = self._backend.aside(self._context)
        if aside is not None:
            attempt = partial(aside.queued, attempt)
        self.under_way.add(record.sequence)
        try:
            work: Work[Any] = self._backend.lanes.start(
                partial(self._beside, attempt, record), str(record), self._context
            )
        except BaseException:
            self.under_way.discard(record.sequence)
            raise
        work.uses(changes if tensor is None else (tensor, *changes))
        work.overwrites(changes)
        if aside is not None:
            work.when_taken(aside.join)
        work.when_seen(lambda: self._unseen.pop(record.sequence, None))
        work.lateness = Lateness(self._backend, self._ranks, timeout, lambda: record)
        return work

    def mark(self, note: str) -> None:
        """Adds a call without messages, which all ranks must make as well, to the signature."""
        # The next collective compares the signature, so a rank that left out the call is found then.
        with self._numbering:
            self._sign(note)
            self._marks += (note,)

    def sign(self, note: str) -> None:
        """Adds a fact of the next collective to the signature, which must be the same on all ranks."""
        with self._numbering:
            self._sign(note)

    def _sign(self, note: str) -> None:
        # First: from now on the library runs no call before the next one of this runner.
        self._numbers.num_marks += 1
        self._numbers.signature = _signed(self._numbers.signature, zlib.crc32(note.encode()))

    def check_seen(self) -> None:
        """Raises the error of the first failed asynchronous operation that nobody has waited for. Else does nothing."""
        for sequence in sorted(self._unseen):
            raise self._unseen.pop(sequence)

    def _begin(self, prepared: Prepared) -> OperationRecord:
        with self._numbering:
            numbers = self._numbers
            # The library runs no call meanwhile.
            numbers.is_held = 1
            try:
                numbers.sequence = sequence = numbers.sequence + 1
                # A checksum of all calls so far, so a difference shows in every later operation too.
                numbers.signature = signature = _signed(numbers.signature, prepared.checksum)
                marks, self._marks, numbers.num_marks = self._marks, (), 0
                return self._recorder.begin(
                    self.name,
                    self._context,
                    sequence,
                    signature,
                    prepared.note,
                    prepared.num_bytes,
                    marks,
                    self._watched_by,
                )
            finally:
                numbers.is_held = 0

    def _run(
        self,
        prepared: Prepared,
        record: OperationRecord,
        tensor: Tensor | None,
        out: Tensor | None,
        timeout: float,
        around: Around | None,
    ) -> Any:
        if record.begun is None:
            record.begun = self._now()
        record.deadline = record.begun + timeout
        try:
            if around is None:
                result = prepared.run(record, tensor, out)
            else:
                around.before()
                result = around.after(prepared.run(record, tensor, out))
        except (Exception, KeyboardInterrupt) as error:
            self._fail(error, record)
        # Ended before the result is written: an `out` that does not fit is an error of this rank alone.
        record.ended = self._clock()
        # The last record is kept for `echelon.flight_recorder`: it must not keep the backend.
        record.watched_by = record.watch = None
        return result if out is None else _write_out(out, result, prepared.note)

    def _fail(self, error: BaseException, record: OperationRecord) -> NoReturn:
        """Ends an operation on all ranks and raises the reason."""
        watch = _diagnosis(self._backend, self._ranks, record)
        told = self._give_up(error, watch, f"rank {self._backend.rank} in {record}")
        record.end(told)
        record.watched_by = record.watch = None
        if told is error:
            raise error
        # The text of a timeout, a departure or a mismatch is in that of `told`, with the words of this group.
        is_repeated = isinstance(error, Timeout) or (isinstance(error, PeerFailed) and error.has_closed)
        is_repeated = is_repeated or (isinstance(error, CollectiveMismatch) and isinstance(told, CollectiveMismatch))
        raise told from (None if is_repeated else without_frames(error))

    def _beside(self, attempt: Callable[[], Any], record: OperationRecord) -> Any:
        try:
            return attempt()
        except Closed as error:
            # The backend's error does not know which operation it ended.
            closed = Closed(f"{record} was still under way when rank {self._backend.rank} closed: wait for it before")
            self._unseen[record.sequence] = closed
            raise closed from error
        except Exception as error:
            self._unseen[record.sequence] = error
            raise
        finally:
            self.under_way.discard(record.sequence)

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


def _signed(signature: int, checksum: int) -> int:
    """Returns the signature of all calls so far and one more, as `native/calls.c` does."""
    return (signature * 0x85EBCA6B + checksum) & 0xFFFFFFFF


@dataclass(slots=True)
class Lateness:
    """Diagnosis of late work in a group's lane: a collective, or a job that calls collectives.

    Args:
        backend: The group's backend.
        ranks: The backend's rank of each member.
        timeout: Timeout of a collective, in seconds.
        find: Returns the collective that the work waits for. None if it waits for none.
    """

    backend: Backend
    ranks: Sequence[int]
    timeout: float
    find: Callable[[], OperationRecord | None]

    def ends_within(self, work: Work[Any], seconds: float) -> bool:
        """Waits for the work. The collective finds a deadlock by itself."""
        return work.ends_within(seconds)

    def patience(self) -> float:
        """Returns the seconds that the collective needs to fail by itself.

        0 if it has not begun, or if its timeout is more than 1 s away.
        """
        # Its own error says more than that of the wait: it has queried all ranks.
        record = self.find()
        begun = None if record is None else record.begun
        if begun is None:
            return 0.0
        left = begun + self.timeout - self.backend.now()
        return left + ANSWER_SECONDS + _SLACK_SECONDS if left < _SLACK_SECONDS else 0.0

    def is_of(self, flight: OperationRecord) -> bool:
        """Whether the work waits for a collective."""
        return self.find() is flight

    def describe_peers(self, seconds: float) -> Timeout:
        """Queries all ranks of the group and returns an error that describes them. Blocks for at most 2 s."""
        record = self.find()
        if record is None:
            return Timeout("no collective of this work is under way")
        try:
            return _diagnosis(self.backend, self.ranks, record).timeout(min(seconds, ANSWER_SECONDS))
        except CollectiveMismatch as mismatch:
            return Timeout(str(mismatch))


def _diagnosis(backend: Backend, ranks: Sequence[int], record: OperationRecord) -> HangDiagnosis:
    return HangDiagnosis(backend, ranks, record, record.started if record.begun is None else record.begun)


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


def _write_out(out: Tensor, result: Tensor, note: str) -> Tensor:
    """Copies a result into the caller's `out`, unless it is there already, and returns `out`.

    Raises:
        SizeMismatch: `out` has another shape or dtype.
    """
    if result is out:
        return out
    if out.shape != result.shape or out.dtype != result.dtype:
        raise SizeMismatch(describe(result.shape, result.dtype), describe(out.shape, out.dtype), f"{note}, out=")
    if result.data_ptr() != out.data_ptr() or not is_plain(out):
        overwrite(out, result)
    return out
