"""The collectives of one group that torch.distributed does, as one rank does them.

Strategy. Operations pass one at a time, in the order in which they were called, whatever threads they come in: the
engine pairs them by their order. Each begins with an agreement of all ranks (see there), so the engine only ever sees
ranks that do the same. The first operation makes the group's process group, when all have come; one that fails takes it
apart, and closes its connections, by which the engine's operation fails on the other ranks as well.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import torch

from echelon.backends.collective import Collective, CollectiveExecutor, Run, received_buffer, result_buffer
from echelon.backends.lanes import InOrder
from echelon.backends.memory import as_bytes, dtype_code, dtype_of, new_tensor
from echelon.backends.operators import Operator, accumulation_dtype
from echelon.backends.torch_distributed.agreement import Agreement
from echelon.backends.torch_distributed.engine import Engine, EngineFailed
from echelon.backends.torch_distributed.engines import native_op
from echelon.errors import PeerFailed
from echelon.operation_records import OperationRecord

# Reductions. 8- and 16-bit floats are combined as float32. Where engines lack a reduction, or do it otherwise than we
# promise, they only carry the data: each rank gets its part of all tensors, and combines it in the order of the ranks.


def all_reduce(
    engine: Engine, _: Facts, collective: Collective, tensor: torch.Tensor, __: torch.Tensor | None
) -> torch.Tensor:
    """Combines `tensor` over all ranks, in place."""
    operator = collective.reduction
    wide = _wide(tensor)
    flat = wide.view(-1)
    op = native_op(operator, flat.dtype)
    if op is not None:
        engine.all_reduce(flat, op)
        operator.finish(flat, engine.num_ranks)
    else:
        parts = flat.tensor_split(engine.num_ranks)
        own = _combined_part(engine, parts, operator)
        engine.exchange([own] * engine.num_ranks, parts)
    return _keep(tensor, wide)


def reduce(
    engine: Engine, _: Facts, collective: Collective, tensor: torch.Tensor, __: torch.Tensor | None
) -> torch.Tensor:
    """Combines `tensor` over all ranks, in place on rank `dst`."""
    operator, dst = collective.reduction, collective.root
    is_dst = engine.rank == dst
    wide = _wide(tensor)
    if not is_dst and wide.data_ptr() == tensor.data_ptr():
        wide = wide.clone()  # an engine may write there
    flat = wide.view(-1)
    op = native_op(operator, flat.dtype)
    if op is not None:
        engine.reduce(flat, dst, op)
        if is_dst:
            operator.finish(flat, engine.num_ranks)
    else:
        parts = flat.tensor_split(engine.num_ranks)
        own = _combined_part(engine, parts, operator)
        nothing = own[:0]
        sends = [own if rank == dst else nothing for rank in range(engine.num_ranks)]
        engine.exchange(sends, parts if is_dst else [nothing] * engine.num_ranks)
    return _keep(tensor, wide) if is_dst else tensor


def reduce_scatter(
    engine: Engine, _: Facts, collective: Collective, tensor: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """Combines `tensor` over all ranks and returns this rank's part of dim 0."""
    operator = collective.reduction
    wide = _wide(tensor)
    parts = wide.tensor_split(engine.num_ranks)
    result = result_buffer(out, parts[engine.rank].shape, tensor)
    op = native_op(operator, wide.dtype)
    if op is not None and len(tensor) % engine.num_ranks == 0:
        own = result if result.dtype == wide.dtype else torch.empty_like(parts[engine.rank])
        engine.reduce_scatter(own.view(-1), wide.view(-1), op)
        operator.finish(own, engine.num_ranks)
    else:
        own = _combined_part(engine, parts, operator)
    return _keep(result, own)


def _combined_part(engine: Engine, parts: Sequence[torch.Tensor], operator: Operator) -> torch.Tensor:
    """Returns this rank's part, combined over all ranks; `parts` split this rank's own tensor."""
    mine = parts[engine.rank]
    came = list(mine.new_empty((engine.num_ranks, *mine.shape)))
    engine.exchange([part.contiguous() for part in parts], came)
    for other in came[1:]:
        operator.combine(came[0], other)
    return operator.finish(came[0], engine.num_ranks)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as contiguous, in its accumulation dtype; the tensor itself if it is so already."""
    return tensor.to(accumulation_dtype(tensor.dtype)).contiguous()


def _keep(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Writes a result into the caller's tensor, unless it is there already, and returns that tensor."""
    if result.data_ptr() != tensor.data_ptr() or result.dtype != tensor.dtype:
        tensor.copy_(result.view(tensor.shape))
    return tensor


# Data movement, as bytes, so that the dtype does not matter.

Facts = Sequence[Sequence[int]]
"""The facts of each rank, by rank, from the agreement."""


def broadcast(
    engine: Engine, _: Facts, collective: Collective, tensor: torch.Tensor, __: torch.Tensor | None
) -> torch.Tensor:
    """Overwrites `tensor` with that of rank `src`, in place."""
    flat = tensor.contiguous()
    if flat.numel():
        engine.broadcast(as_bytes(flat), collective.root)
    return _keep(tensor, flat)


def all_gather(
    engine: Engine, told: Facts, _: Collective, rows: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """Returns the rows of all ranks; each has told how many it has."""
    counts = [facts[0] for facts in told]
    result = result_buffer(out, (sum(counts), *rows.shape[1:]), rows)
    if not result.numel():
        return result
    if len(set(counts)) == 1:
        engine.all_gather(as_bytes(result), as_bytes(rows.contiguous()))
        return result
    # Engines gather tensors of one size only, so each rank broadcasts its rows.
    places = torch.split(result, counts)
    places[engine.rank].copy_(rows)
    for src, part in enumerate(places):
        if part.numel():
            engine.broadcast(as_bytes(part), src)
    return result


def gather(
    engine: Engine, told: Facts, collective: Collective, rows: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor | None:
    """Returns the rows of all ranks on rank `dst`; each has told how many it has."""
    dst = collective.root
    # An exchange in which only `dst` receives: the engine's gather would need equally many rows.
    nothing = rows.new_empty(0)
    sends = [rows.contiguous() if rank == dst else nothing for rank in range(engine.num_ranks)]
    if engine.rank != dst:
        engine.exchange(sends, [nothing] * engine.num_ranks)
        return None
    counts = [facts[0] for facts in told]
    result = result_buffer(out, (sum(counts), *rows.shape[1:]), rows)
    engine.exchange(sends, torch.split(result, counts))
    return result


def scatter(
    device: torch.device,
    engine: Engine,
    told: Facts,
    collective: Collective,
    tensor: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Returns this rank's part of the tensor of rank `src`; `told` holds its device, dtype and shape."""
    is_on_device, code, num_rows, *row = told[collective.root]
    where = device if is_on_device else torch.device("cpu")
    count = len(range(engine.rank, num_rows, engine.num_ranks))  # as torch.tensor_split: the first have one more
    part = received_buffer(out, (count, *row), dtype_of(code), where, tensor)
    nothing = part.new_empty(0)
    sends: Sequence[torch.Tensor] = [nothing] * engine.num_ranks
    if tensor is not None:
        sends = [piece.contiguous() for piece in tensor.tensor_split(engine.num_ranks)]
    engine.exchange(sends, [part if peer == collective.root else nothing for peer in range(engine.num_ranks)])
    return part


def all_to_all(
    engine: Engine, told: Facts, _: Collective, rows: torch.Tensor, out: torch.Tensor | None
) -> tuple[torch.Tensor, list[int]]:
    """Sends each rank its part of this rank's rows. Returns the received rows and their numbers; `told` holds all."""
    counts = [facts[engine.rank] for facts in told]
    result = result_buffer(out, (sum(counts), *rows.shape[1:]), rows)
    parts = torch.split(rows, list(told[engine.rank]))
    engine.exchange([part.contiguous() for part in parts], torch.split(result, counts))
    return result, counts


class Host(Protocol):
    """Part of the backend that a group uses."""

    @property
    def rank(self) -> int:
        """This rank of the world."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors are, if they are not in the CPU's memory."""
        ...

    def now(self) -> float:
        """Returns the time, in seconds."""
        ...

    def finish_queued(self) -> None:
        """Blocks until this rank's device has run all work on the caller's stream."""
        ...

    def check(self, context: int) -> None:
        """Raises Closed, or the failure that revoked the group, if it cannot begin an operation."""
        ...

    def check_liveness(self, deadline: float, context: int, ranks: Sequence[int]) -> None:
        """Raises the reason to stop waiting, if there is one: revocation, a rank's death, or Timeout."""
        ...

    def explain(self, failure: EngineFailed, call: OperationRecord, context: int, ranks: Sequence[int]) -> NoReturn:
        """Raises the error for an engine's failure: a rank's failure if that was the cause."""
        ...

    def open(self, context: int, ranks: Sequence[int], call: OperationRecord) -> Engine:
        """Returns a new engine for a group; all its ranks call it."""
        ...


class EngineExecutor(CollectiveExecutor):
    """Collectives of one group on one rank."""

    def __init__(self, host: Host, context: int, ranks: tuple[int, ...], agree: Agreement) -> None:
        """Connects nothing yet.

        Args:
            host: see there.
            context: of the group.
            ranks: the world's rank of each member.
            agree: how they agree on an operation before it begins.
        """
        self._host = host
        self._context = context
        self._ranks = ranks
        self._agree = agree
        self._turns = InOrder()
        self._engine: Engine | None = None
        self._interrupted: int | None = None

    def prepare(self, collective: Collective) -> Run:  # noqa: D102
        if collective.op:
            _ = collective.reduction  # raises now, before the collective has a number
        run = partial(self._run, collective)
        return collective.checked(run) if collective.kind == "all_to_all" else run

    def close(self) -> None:
        """Takes the process group apart, if there is one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _run(
        self, collective: Collective, call: OperationRecord, tensor: torch.Tensor | None, out: torch.Tensor | None
    ) -> Any:
        """Runs an operation when its turn has come. Blocks for earlier ones of the group."""
        turns, number = self._turns, call.sequence
        if turns.next != number:
            turns.enter(number, lambda: self._host.check_liveness(call.deadline, self._context, self._ranks))
        try:
            self._host.check(self._context)
            if self._interrupted is not None:
                raise PeerFailed(self._host.rank, f"its operation #{self._interrupted} was interrupted")
            return self._act(collective, call, tensor, out)
        except BaseException:
            self._interrupted = self._interrupted or number
            # The connections end with the engine, so the operation fails on the other ranks as well.
            self.close()
            raise
        finally:
            turns.leave(number)

    def _act(
        self, collective: Collective, call: OperationRecord, tensor: torch.Tensor | None, out: torch.Tensor | None
    ) -> Any:
        if collective.kind == "barrier":
            # A barrier waits for each rank's device as well.
            self._host.finish_queued()
        if tensor is not None and not tensor.is_cpu and collective.kind != "scatter":
            # Ranks that differ in the device would be in two engines, so it is part of what they compare.
            call = copy.copy(call)
            call.operation += f" on {tensor.device.type}"
        told = self._agree(call, self._facts(collective, tensor))
        if collective.kind == "barrier":
            return None
        if collective.kind == "empty":
            assert collective.shape is not None
            assert collective.dtype is not None
            return new_tensor(tuple(collective.shape), collective.dtype)
        act = partial(scatter, self._host.device) if collective.kind == "scatter" else _ACTS[collective.kind]
        try:
            engine = self._engine = self._engine or self._host.open(self._context, self._ranks, call)
            seconds = call.deadline - self._host.now()
            with engine.limited(seconds, lambda: self._host.check_liveness(call.deadline, self._context, self._ranks)):
                return act(engine, told, collective, tensor, out)
        except EngineFailed as failure:
            _forget_operation(failure)
            self._host.explain(failure, call, self._context, self._ranks)

    def _facts(self, collective: Collective, tensor: torch.Tensor | None) -> Sequence[int]:
        """Returns the numbers of this rank that others need to allocate their results."""
        if tensor is None or collective.kind not in _TELLS:
            return ()
        if collective.kind == "scatter":
            is_on_device = tensor.device.type == self._host.device.type
            return [int(is_on_device), dtype_code(tensor.dtype), *tensor.shape]
        if collective.kind == "all_to_all":
            splits, count = collective.in_splits, len(self._ranks)
            return splits if splits is not None else [len(range(rank, len(tensor), count)) for rank in range(count)]
        return (len(tensor),)


_TELLS = frozenset({"all_gather", "broadcast_rows", "gather", "scatter", "all_to_all"})
"""Collectives whose ranks may have tensors of different sizes."""
_ACTS: Mapping[str, Callable[..., Any]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "broadcast_rows": all_gather,
    "gather": gather,
    "all_to_all": all_to_all,
}


def _forget_operation(failure: BaseException) -> None:
    """Clears the frames of an error's traceback: their operation would keep the connections open."""
    error: BaseException | None = failure
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
