"""Collectives of real values among ranks of which only some run: absent ranks are represented.

Strategy. Contributions are kept by group and sequence, so that a rank that runs later finds them. A rank that has not
arrived is represented by the nearest one that has, else by the caller itself. A root or a stage of a pipeline cannot be
represented: the caller waits for it, and its rank is started if it does not run.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from echelon._torch_private.tensors import FakeTensor, real_tensors
from echelon.backends.collective import Collective, CollectiveExecutor, UniformExecutor
from echelon.backends.formats.wire import Tag, readable, signed
from echelon.backends.host_copies import StreamScope
from echelon.backends.memory import as_bytes, new_tensor
from echelon.backends.modes import overwrite
from echelon.backends.work import Work
from echelon.call_site import calling_place, source_of
from echelon.errors import CollectiveMismatch, UnsupportedOp
from echelon.foresight.record.here import recording_here
from echelon.foresight.record.log.callers import called_by_program
from echelon.foresight.record.log.calls import Call, answer
from echelon.foresight.record.log.log import Log
from echelon.foresight.record.ranks.collectives import recorded_collective
from echelon.foresight.record.ranks.mail import Mail
from echelon.foresight.record.ranks.messages import RecordingMessages, Undelivered
from echelon.foresight.trace import Group, RecordEvent, WaitEvent
from echelon.operation_records import OperationRecord
from echelon.pipeline.run.agreement import STAGES
from echelon.simulation.backend import VirtualBackend, VirtualLanes
from echelon.simulation.boundary import Activity, VirtualWork
from echelon.simulation.meeting import FROM_ROOT
from echelon.simulation.values import Calls, result_of, snapshot
from echelon.simulation.world import World
from echelon.wording import counted

T = TypeVar("T")

_UNEVEN = {
    "all_gather": "give out= with the rows of all ranks",
    "gather": "call all_gather with out=, or gather tensors of equal size",
    "all_to_all": "give out_splits=",
}
"""Collectives to which ranks may bring different numbers of rows, each with the remedy for an unknown result size."""


ALIKE = "ranks that are not recorded contribute the values of a recorded one to {}"
"""Assumption about a collective whose values the program knows."""


@dataclass
class _Contribution:
    collective: Collective
    tensor: Tensor | None
    """Values. None if there are none, or if the tensor is fake."""
    is_fake: bool
    note: str
    place: str
    tells_sizes: bool
    """Whether the call itself says how many rows its result has."""


@dataclass
class _Call:
    """One collective of one group: the contributions of the ranks that have arrived."""

    contributions: dict[int, _Contribution] = field(default_factory=dict)
    """By rank in the group."""
    waiting: list[Work[None]] = field(default_factory=list)


class Exchange:
    """Contributions of all ranks, and the function that starts a rank."""

    def __init__(self, start: Callable[[int], object], has_begun: Callable[[int], bool]) -> None:
        self.start = start
        self.undelivered = Undelivered(start)
        self.mail = Mail(start, has_begun)
        self._calls: dict[tuple[int, tuple[int, ...], int], _Call] = {}

    def call(self, context: int, ranks: tuple[int, ...], sequence: int) -> _Call:
        """Returns a collective of a group."""
        return self._calls.setdefault((context, ranks, sequence), _Call())

    def facts(self, rank: int | None = None) -> dict[tuple[Any, ...], str]:
        """Returns a digest of a rank's contribution to each collective.

        Args:
            rank: the rank. None: all ranks. The digest is empty if their contributions differ.
        """
        found: dict[tuple[Any, ...], str] = {}
        for key, call in self._calls.items():
            ranks = key[1]
            digests = {
                _digest(each) for place, each in call.contributions.items() if rank is None or ranks[place] == rank
            }
            if digests:
                found[key] = digests.pop() if len(digests) == 1 else ""
        return found


def _digest(contribution: _Contribution) -> str:
    found = hashlib.blake2b(f"{contribution.note} {contribution.collective!r} {contribution.is_fake}".encode())
    if contribution.tensor is not None:
        with real_tensors():
            found.update(as_bytes(contribution.tensor).numpy().tobytes())
    return found.hexdigest()


class ExchangeExecutor(UniformExecutor):
    """Collectives of one group on one recorded rank."""

    def __init__(self, backend: RecordingBackend, ranks: tuple[int, ...], context: int) -> None:
        self._backend = backend
        self._ranks = ranks
        self._context = context
        self._rank = ranks.index(backend.rank)

    def _run(self, collective: Collective, record: OperationRecord, tensor: Tensor | None, out: Tensor | None) -> Any:
        recording = recording_here()
        if recording is None:
            return self._meet(collective, record, tensor, out)
        recording.log.num_of_all += len(self._ranks) == self._backend.world_size
        with recording.log.call(collective.kind) as made:
            if made.is_answered:
                with real_tensors():
                    return _answered(made, tensor, out)
            result = self._meet(collective, record, tensor, out)
            made.values = _answer(result, tensor)
            return result

    def _meet(self, collective: Collective, record: OperationRecord, tensor: Tensor | None, out: Tensor | None) -> Any:
        call = self._backend.exchange.call(self._context, self._ranks, record.sequence)
        note = signed(record.operation, record.sequence, record.signature)
        is_fake = isinstance(tensor, FakeTensor)
        with torch.no_grad():
            with real_tensors():
                values = None if tensor is None or is_fake else snapshot(tensor)
            tells_sizes = (out if collective.kind == "all_gather" else collective.out_splits) is not None
            own = _Contribution(collective, values, is_fake, note, source_of(calling_place()), tells_sizes)
            self._check(call, own)
            # Before this rank waits itself, since others may wait for it.
            call.contributions[self._rank] = own
            for work in call.waiting:
                work.complete()
            call.waiting.clear()
            for rank in self._needed(collective, record, is_fake):
                while rank not in call.contributions:
                    self._wait_for(call, self._ranks[rank], record)
                    # Other ranks have run meanwhile, each with its own state of the process.
                    self._backend.boundary.resume()
            parts = [self._part_of(call, rank, own) for rank in range(len(self._ranks))]
            if is_fake or (collective.kind in FROM_ROOT and parts[collective.root].is_fake):
                recording = recording_here()
                assert recording is not None, "only recorded ranks have fake tensors"
                group, collectives = self._backend.group_of(self._context), [part.collective for part in parts]
                return recorded_collective(recording, group, collectives, self._rank, tensor, out)
            self._note_absent(call, collective)
            calls = Calls(
                [part.collective for part in parts], [part.tensor for part in parts], [None] * len(parts), plan=None
            )
            with real_tensors():
                return result_of(calls)(self._rank, tensor, out, record)

    def _needed(self, collective: Collective, record: OperationRecord, is_fake: bool) -> Sequence[int]:
        """Returns the ranks of the group that cannot be represented by others."""
        if collective.kind in FROM_ROOT and not is_fake:
            # Nobody else has its values.
            return (collective.root,)
        # Each stage has names, times and a loss of its own.
        return range(len(self._ranks)) if not is_fake and record.group.endswith(STAGES) else ()

    def _check(self, call: _Call, own: _Contribution) -> None:
        for rank, other in call.contributions.items():
            if other.note != own.note:
                raise CollectiveMismatch(
                    f"rank {self._ranks[rank]} calls {readable(other.note)} at {other.place}, but rank "
                    f"{self._backend.rank} {readable(own.note)} at {own.place}"
                )
            if own.is_fake and other.is_fake and own.collective.kind in _UNEVEN:
                self._check_sizes(rank, other, own)

    def _check_sizes(self, rank: int, other: _Contribution, own: _Contribution) -> None:
        """Refuses tensors of different sizes if a result depends on the sizes of ranks that may be absent."""
        ours, theirs = own.collective, other.collective
        is_known = own.tells_sizes and other.tells_sizes
        if is_known or (ours.shape, ours.in_splits) == (theirs.shape, theirs.in_splits):
            return
        assert ours.shape is not None, "every rank has a tensor"
        assert theirs.shape is not None, "every rank has a tensor"
        parts = " in other parts" if ours.shape == theirs.shape else ""
        raise UnsupportedOp(
            f"{ours.kind} of {counted(ours.shape[0], 'row')} on rank {self._backend.rank} at {own.place}, and of "
            f"{counted(theirs.shape[0], 'row')}{parts} on rank {self._ranks[rank]}: its result has an unknown size, "
            f"because not all ranks are recorded: {_UNEVEN[ours.kind]}"
        )

    def _part_of(self, call: _Call, rank: int, own: _Contribution) -> _Contribution:
        found = call.contributions.get(rank)
        if found is not None:
            return found
        nearest = min(call.contributions, key=lambda other: (abs(other - rank), other))
        return call.contributions[nearest] if len(call.contributions) > 1 else own

    def _note_absent(self, call: _Call, collective: Collective) -> None:
        """Notes the assumption by which ranks that have not arrived are represented, if the program itself asks them.

        Libraries exchange facts that are equal on all ranks, such as shapes.
        """
        recording = recording_here()
        is_complete = collective.kind in (*FROM_ROOT, "barrier") or len(call.contributions) == len(self._ranks)
        if recording is not None and not is_complete and (name := called_by_program()):
            recording.log.assume(ALIKE.format(name))

    def _wait_for(self, call: _Call, peer: int, record: OperationRecord) -> None:
        backend = self._backend
        work: VirtualWork[None] = VirtualWork(
            backend.boundary,
            Activity("collective with", peer, Tag(self._context, record.sequence)),
            backend.timeout,
            peer,
            record.operation,
            None,
        )
        call.waiting.append(work)
        backend.exchange.start(peer)
        work.wait()


class RecordingBackend(VirtualBackend):
    """Simulated rank that exchanges only real values. Communication of fake tensors is recorded."""

    def __init__(self, rank: int, world_size: int, world: World, timeout: float, exchange: Exchange) -> None:
        super().__init__(rank, world_size, world, timeout)
        self.exchange = exchange
        self.messages = RecordingMessages(rank, world_size, timeout, self.boundary, exchange.undelivered, self.group_of)
        self.lanes = _LanesAtOnce(self.control, world, self.boundary, timeout)
        self._numbers: Counter[tuple[int, ...]] = Counter()
        self._groups: dict[int, tuple[tuple[int, ...], int]] = {}
        """Ranks and number of each group, by its context."""
        self._streams: dict[int, int] = {}

    def executor(self, context: int, ranks: Sequence[int]) -> CollectiveExecutor:  # noqa: D102
        members = tuple(ranks)
        self._groups[context] = members, self._numbers[members]
        self._numbers[members] += 1
        return ExchangeExecutor(self, members, context)

    def group_of(self, context: int) -> Group:
        """Returns a group as a value of the trace."""
        ranks, number = self._groups[context]
        latest = self.flight_recorder.latest(context)
        return Group(ranks, "" if latest is None else latest.group, number)

    def compute(self, step: object) -> AbstractContextManager[None]:
        """Notes the entries of a step of a schedule; see `Backend.compute`."""
        recording = recording_here()
        return nullcontext() if recording is None else recording.log.computing(step)

    def aside(self, context: int) -> StreamScope | None:
        """Returns the place of an asynchronous operation on the stream of its group; see `Backend.aside`."""
        recording = recording_here()
        if recording is None:
            return None
        log = recording.log
        if context not in self._streams:
            self._streams[context] = log.new_stream()
        return _RecordedScope(log, self._streams[context])


# Asynchronous operations: each runs when it is started, on a stream of its group.


class _RecordedScope(StreamScope):
    """Place of one asynchronous operation among the streams of a recorded rank."""

    def __init__(self, log: Log, stream: int) -> None:
        """Takes the log of the rank, and the stream of the operation's group."""
        self._log = log
        self._stream = stream
        self._ended = 0

    def queued(self, function: Callable[[], T]) -> T:
        log, first = self._log, len(self._log.entries)
        outer, log.stream = log.stream, self._stream
        try:
            result = function()
        finally:
            log.stream = outer
        # An operation on values of the host leaves no entries, and needs no streams.
        if len(log.entries) > first:
            begun, self._ended = log.new_event(), log.new_event()
            log.entries[first:first] = [RecordEvent(outer, begun), WaitEvent(self._stream, begun)]
            log.entries.append(RecordEvent(self._stream, self._ended))
        return result

    def join(self) -> None:
        if self._ended:
            self._log.entries.append(WaitEvent(self._log.stream, self._ended))
            self._ended = 0


class _LanesAtOnce(VirtualLanes):
    """Lanes whose operations run in the thread that starts them, since only that thread records its rank."""

    def start(self, function: Callable[[], T], description: str, lane: int = 0) -> Work[T]:  # noqa: ARG002
        work: VirtualWork[T] = self.wait_of(description)  # type: ignore[assignment]
        try:
            work.complete(function())
        except Exception as error:
            work.complete(error=error)
        return work


# Answers


class _Answer(NamedTuple):
    """Result of a collective."""

    shape: torch.Size
    dtype: torch.dtype
    values: Tensor | None
    """None for a fake tensor."""
    is_in_place: bool


def _answer(result: Tensor | None, tensor: Tensor | None) -> _Answer | None:
    if result is None:
        return None
    values = None
    if not isinstance(result, FakeTensor):
        with real_tensors():
            values = snapshot(result)
    return _Answer(result.shape, result.dtype, values, result is tensor)


def _answered(call: Call, tensor: Tensor | None, out: Tensor | None) -> Tensor | None:
    """Returns the result of a collective as it was recorded, in the caller's tensor if it was recorded there."""
    known: _Answer | None = call.values
    if known is None:
        return None
    result = tensor if known.is_in_place else out
    if result is None:
        result = new_tensor(tuple(known.shape), known.dtype)
    if known.values is not None:
        overwrite(result, known.values.reshape(result.shape))
    elif not known.is_in_place:
        answer(call, [result], [] if tensor is None else [tensor], None)
    return result
