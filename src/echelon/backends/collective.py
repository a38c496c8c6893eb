"""A collective as a value, and the interface of the executors that run it.

Strategy. A group prepares each `Collective` once: an executor turns the value into a function, and the group keeps the
function under the value. There are four executors: plans over messages (`collectives/calls/plan_executor`), memory
that the ranks share (`shared/collectives`), an engine of torch (`torch_distributed/collectives`), and one event of a
simulation (`simulation/whole`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from echelon._native import Calls
from echelon._torch_private.tensors import FakeTensor, storage_address
from echelon.backends.memory import describe, is_plain, new_tensor, plain
from echelon.backends.messages import NativeMessage
from echelon.backends.operators import Operator, operator
from echelon.backends.work import Work
from echelon.errors import CollectiveMismatch, Timeout
from echelon.operation_records import FlightRecorder, KnownOperation, OperationRecord

T = TypeVar("T")

_NOTES = {
    "all_reduce": "all_reduce({op}) of {whole}",
    "reduce": "reduce({op}, dst={root}) of {whole}",
    "reduce_scatter": "reduce_scatter({op}) of {whole}",
    "broadcast": "broadcast(src={root}) of {whole}",
    "all_gather": "all_gather of rows of {row}",
    "gather": "gather(dst={root}) of rows of {row}",
    "scatter": "scatter(src={root})",
    "all_to_all": "all_to_all of rows of {row}",
    "barrier": "barrier",
    "empty": "empty of {whole}",
}
"""Text that ranks compare. It holds what must be equal on all ranks: the numbers of rows may differ."""
REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})
"""Collectives with a reduction."""


class Collective(NamedTuple):
    """A collective on one rank: everything but the tensor's values."""

    kind: str
    """Name of the group's method; or "broadcast_rows", a broadcast of which only the source knows the shape."""
    shape: torch.Size | None = None
    """Shape of this rank's tensor. None if it has none."""
    dtype: torch.dtype | None = None
    op: str = ""
    """The reduction."""
    root: int = -1
    """Rank `src` or `dst` of the group."""
    in_splits: tuple[int, ...] | None = None
    """Rows of an all-to-all for each rank. None: as torch.tensor_split."""
    out_splits: tuple[int, ...] | None = None
    """Rows that an all-to-all expects from each rank. None: any."""
    name: str = ""
    """Text that ranks compare in place of the usual one, for collectives that are packed into this one."""

    @property
    def note(self) -> str:
        """Text that ranks compare."""
        if self.name:
            return self.name
        whole = row = ""
        if self.shape is not None and self.dtype is not None:
            whole, row = describe(self.shape, self.dtype), describe(self.shape[1:], self.dtype)
        return _NOTES[self.kind].format(op=self.op, root=self.root, whole=whole, row=row)

    @property
    def num_bytes(self) -> int:
        """Size of this rank's tensor. 0 if it has none, or the collective makes it."""
        if self.shape is None or self.dtype is None or self.kind == "empty":
            return 0
        return self.shape.numel() * self.dtype.itemsize

    @property
    def reduction(self) -> Operator:
        """Operator of `op` for this dtype.

        Raises:
            UnsupportedOp: there is none.
        """
        assert self.dtype is not None, "a reduction has a tensor"
        return operator(self.op, self.dtype)

    def empty(self) -> Tensor:
        """Returns a new tensor of this shape and dtype, without values."""
        assert self.shape is not None
        assert self.dtype is not None
        return new_tensor(tuple(self.shape), self.dtype)

    def checked(self, run: Callable[..., tuple[Tensor, Sequence[int]]]) -> Run:
        """Returns the function of an all-to-all, from one that also returns how many rows came from each rank.

        The numbers are checked after the collective has left the executor, so that other ranks finish theirs.
        """

        def run_and_check(call: OperationRecord, rows: Tensor | None, out: Tensor | None) -> Tensor:
            result, counts = run(call, rows, out)
            self.check_counts(counts, call)
            return result

        return run_and_check

    def check_counts(self, counts: Sequence[int], call: OperationRecord) -> None:
        """Raises CollectiveMismatch unless the ranks have sent as many rows as `out_splits` says."""
        if self.out_splits is not None and tuple(counts) != self.out_splits:
            rows = "elements" if self.shape is not None and len(self.shape) == 1 else "rows"
            raise CollectiveMismatch(
                f"{call}: out_splits={list(self.out_splits)}, but the ranks sent {list(counts)} {rows}: make them agree"
            )


Run: TypeAlias = Callable[[OperationRecord, Tensor | None, Tensor | None], Any]
"""Runs a prepared collective. Blocks until it is done. Takes the record, this rank's tensor, and `out`.

all_reduce, reduce and broadcast work in place and return the tensor. Others return their result, which is written into
`out` if it fits there, else into a new tensor. The tensor has any strides, but no lazy conjugate or negative, and is
part of no graph. Rows have at least one dim. Raises CollectiveMismatch if the ranks' notes differ, PeerFailed, Timeout,
and Closed.
"""


class KnownCalls(ABC):
    """Collectives and messages of one group that repeat an earlier one, made without the runner of the group."""

    numbers: Calls
    """Numbers of the group's calls."""
    run: Callable[..., Any]
    """Runs a collective: takes kind, root, op, tensor and `out`. True if it is done, (result,) if it is done with
    a new tensor, False if nothing was done. Else the object of the call, its number and its signature: it has begun,
    and the runner goes on with it."""
    send: Callable[..., Any]
    """Sends a message: takes destination, tag and tensor. False if nothing was done."""
    receive: Callable[..., Any]
    """Receives a message: takes source, tag and `out`. Returns the tensor. False if nothing was done."""

    @abstractmethod
    def record_into(self, recorder: FlightRecorder, context: int) -> None:
        """Has these calls added to a flight recorder, as calls of the group with this context. Called once, first."""

    @abstractmethod
    def learn(
        self,
        run: Run,
        call: KnownOperation,
        checksum: int,
        key: tuple[str, int, str],
        tensor: Tensor | None,
        out: Any,
        result: Any,
    ) -> bool:
        """Takes over a collective that the runner has run. False if it is not for this.

        Args:
            run: the function that has run it.
            call: describes it in records. Not kept once the collective is forgotten.
            checksum: of its note, for the signature.
            key: kind, root and op, as the program gave it.
            tensor, out: of this rank.
            result: its result.
        """

    @abstractmethod
    def learn_message(self, peer: int, tag: int, native: NativeMessage, call: KnownOperation) -> None:
        """Takes over messages like one that the group has sent or received.

        Args:
            peer, tag: as the program gave them.
            native: how the native library moves them.
            call: describes them in records.
        """


class CollectiveExecutor(ABC):
    """Runs the collectives of one group on one rank. Calls may come in any thread."""

    known: KnownCalls | None = None
    """Collectives that repeat an earlier one. None if the runner runs all."""

    @abstractmethod
    def prepare(self, collective: Collective) -> Run:
        """Returns the function that runs a collective. It is called again and again."""


class UniformExecutor(CollectiveExecutor):
    """Executor that runs collectives of all kinds in one way."""

    def prepare(self, collective: Collective) -> Run:  # noqa: D102
        if collective.op:
            _ = collective.reduction  # raises now, before the collective has a number
        if collective.kind == "empty":
            return lambda *_: collective.empty()
        return partial(self._run, collective)

    @abstractmethod
    def _run(
        self, collective: Collective, record: OperationRecord, tensor: Tensor | None, out: Tensor | None
    ) -> Any: ...


def wait_and_look(work: Work[T], peer: int, call: OperationRecord, now: Callable[[], float]) -> T:
    """Blocks until a message of a collective is done. Diagnoses a wait that takes long.

    Args:
        work: the message.
        peer: the backend's rank at its other end.
        call: the collective.
        now: returns the backend's time.

    Raises:
        Timeout: the collective's deadline has passed.
        CollectiveMismatch: the peer makes other calls than this rank.
        EchelonError: the message failed.
    """
    lookout, deadline = call.lookout, call.deadline
    while True:
        try:
            return work.wait(max(0.0, min(deadline, lookout.next_check_at) - now()))
        except Timeout:
            if now() >= deadline:
                raise
            # Only the time of the next check has come, not the deadline.
            lookout.look(peer, work.is_completed)


def can_hold(out: Tensor, shape: Sequence[int], source: Tensor) -> bool:
    """Whether a result of this shape, computed from `source`, can be written into `out` piece by piece."""
    # Overlapping memory is excluded: a piece written early would change a part of `source` that is still to be sent.
    return (
        out.shape == tuple(shape)
        and out.dtype is source.dtype
        and out.device == source.device
        and is_plain(out)
        and _are_apart(out, source)
    )


def _are_apart(out: Tensor, source: Tensor) -> bool:
    """Whether `out`, which is plain, shares no byte with `source`."""
    if isinstance(out, FakeTensor):  # without addresses of its own
        return storage_address(out.untyped_storage()) != storage_address(source.untyped_storage())
    # The bytes of a strided tensor are not one range, so it must be in another storage.
    if not source.is_contiguous():
        return out.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
    start, other = out.data_ptr(), source.data_ptr()
    return start + out.nbytes <= other or other + source.nbytes <= start


def result_buffer(out: Tensor | None, shape: Sequence[int], source: Tensor) -> Tensor:
    """Returns a contiguous tensor for a result: `out` if it can hold it, else a new one like `source`."""
    if out is not None and can_hold(out, shape, source):
        return plain(out)
    return new_tensor(tuple(shape), source.dtype, source.device)


def received_buffer(
    out: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: Tensor | None
) -> Tensor:
    """Returns a contiguous tensor for a part of another rank's tensor; `source` is this rank's, if it has one."""
    if source is not None:
        return result_buffer(out, shape, source)
    kind = tuple(shape), dtype, device
    if out is not None and (out.shape, out.dtype, out.device) == kind and is_plain(out):
        return plain(out)
    return new_tensor(tuple(shape), dtype, device)
