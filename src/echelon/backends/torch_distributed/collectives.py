"""The collectives of one group that torch.distributed does, as one rank does them.

Strategy. Operations pass one at a time, in the order in which they were called, whatever threads they come in: the
engine pairs them by their order. Each begins with an agreement of all ranks (see there), so the engine only ever sees
ranks that do the same. The first operation makes the group's process group, when all have come; one that fails takes it
apart, and closes its connections, by which the engine's operation fails on the other ranks as well.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, TypeVar

import torch

from echelon.backends.lanes import InOrder
from echelon.backends.memory import as_bytes, dtype_code, dtype_of, new_tensor
from echelon.backends.native import Allocate, AllocateAny, Call, Gathered, NativeCollectives
from echelon.backends.operators import Operator, accumulation_dtype
from echelon.backends.torch_distributed.agreement import Agreement
from echelon.backends.torch_distributed.engine import Engine, EngineFailed
from echelon.backends.torch_distributed.engines import native_op
from echelon.errors import PeerFailed

# Reductions. 8- and 16-bit floats are combined as float32. Where engines lack a reduction, or do it otherwise than we
# promise, they only carry the data: each rank gets its part of all tensors, and combines it in the order of the ranks.


def all_reduce(engine: Engine, tensor: torch.Tensor, operator: Operator) -> None:
    """Combines `tensor` over all ranks, in place."""
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
    _keep(tensor, wide)


def reduce(engine: Engine, tensor: torch.Tensor, dst: int, operator: Operator) -> None:
    """Combines `tensor` over all ranks, in place on rank `dst`."""
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
    if is_dst:
        _keep(tensor, wide)


def reduce_scatter(engine: Engine, tensor: torch.Tensor, operator: Operator, place: Allocate) -> torch.Tensor:
    """Combines `tensor` over all ranks and returns this rank's part of dim 0."""
    wide = _wide(tensor)
    parts = wide.tensor_split(engine.num_ranks)
    result = place(parts[engine.rank].shape)
    op = native_op(operator, wide.dtype)
    if op is not None and len(tensor) % engine.num_ranks == 0:
        own = result if result.dtype == wide.dtype else torch.empty_like(parts[engine.rank])
        engine.reduce_scatter(own.view(-1), wide.view(-1), op)
        operator.finish(own, engine.num_ranks)
    else:
        own = _combined_part(engine, parts, operator)
    _keep(result, own)
    return result


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


def _keep(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Writes a result into the caller's tensor, unless it is there already."""
    if result.data_ptr() != tensor.data_ptr() or result.dtype != tensor.dtype:
        tensor.copy_(result.view(tensor.shape))


# Data movement, as bytes, so that the dtype does not matter.

Facts = Sequence[Sequence[int]]
"""The facts of each rank, by rank, from the agreement."""


def broadcast(engine: Engine, tensor: torch.Tensor, src: int) -> None:
    """Overwrites `tensor` with that of rank `src`, in place."""
    flat = tensor.contiguous()
    if flat.numel():
        engine.broadcast(as_bytes(flat), src)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat)


def all_gather(engine: Engine, told: Facts, rows: torch.Tensor, place: Allocate) -> torch.Tensor:
    """Returns the rows of all ranks; each has told how many it has."""
    counts = [facts[0] for facts in told]
    result = place((sum(counts), *rows.shape[1:]))
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


def gather(engine: Engine, told: Facts, rows: torch.Tensor, dst: int, place: Allocate) -> torch.Tensor | None:
    """Returns the rows of all ranks on rank `dst`; each has told how many it has."""
    # An exchange in which only `dst` receives: the engine's gather would need equally many rows.
    nothing = rows.new_empty(0)
    sends = [rows.contiguous() if rank == dst else nothing for rank in range(engine.num_ranks)]
    if engine.rank != dst:
        engine.exchange(sends, [nothing] * engine.num_ranks)
        return None
    counts = [facts[0] for facts in told]
    result = place((sum(counts), *rows.shape[1:]))
    engine.exchange(sends, torch.split(result, counts))
    return result


def scatter_facts(tensor: torch.Tensor | None, device: torch.device) -> list[int]:
    """Returns the facts of the scattering rank: 1 if the tensor is on the device, else 0; dtype code; shape."""
    if tensor is None:
        return []
    return [int(tensor.device.type == device.type), dtype_code(tensor.dtype), *tensor.shape]


def scatter(
    engine: Engine, told: Facts, tensor: torch.Tensor | None, src: int, device: torch.device, place: AllocateAny
) -> torch.Tensor:
    """Returns this rank's part of the tensor of rank `src`; `told` holds its device, dtype and shape."""
    is_on_device, code, num_rows, *row = told[src]
    where = device if is_on_device else torch.device("cpu")
    count = len(range(engine.rank, num_rows, engine.num_ranks))  # as torch.tensor_split: the first have one more
    part = place((count, *row), dtype_of(code), where)
    nothing = part.new_empty(0)
    sends: Sequence[torch.Tensor] = [nothing] * engine.num_ranks
    if tensor is not None and engine.rank == src:
        sends = [piece.contiguous() for piece in tensor.tensor_split(engine.num_ranks)]
    engine.exchange(sends, [part if peer == src else nothing for peer in range(engine.num_ranks)])
    return part


def all_to_all(
    engine: Engine, told: Facts, parts: Sequence[torch.Tensor], rows: torch.Tensor, place: Allocate
) -> Gathered:
    """Sends each rank its part of this rank's rows, and returns the received rows; `told` holds all sizes."""
    counts = [facts[engine.rank] for facts in told]
    result = place((sum(counts), *rows.shape[1:]))
    engine.exchange([part.contiguous() for part in parts], torch.split(result, counts))
    return Gathered(result, counts)


T = TypeVar("T")


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

    def explain(self, failure: EngineFailed, call: Call, context: int, ranks: Sequence[int]) -> NoReturn:
        """Raises the error for an engine's failure: a rank's failure if that was the cause."""
        ...

    def open(self, context: int, ranks: Sequence[int], call: Call) -> Engine:
        """Returns a new engine for a group; all its ranks call it."""
        ...


class TorchCollectives(NativeCollectives):
    """The collectives of one group."""

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
        self._turnstile = InOrder()
        self._engine: Engine | None = None
        self._interrupted: int | None = None

    def all_reduce(self, call: Call, tensor: torch.Tensor, operator: Operator) -> None:  # noqa: D102
        self._pass(call, tensor, (), lambda engine, _: all_reduce(engine, tensor, operator))

    def reduce(self, call: Call, tensor: torch.Tensor, dst: int, operator: Operator) -> None:  # noqa: D102
        self._pass(call, tensor, (), lambda engine, _: reduce(engine, tensor, dst, operator))

    def reduce_scatter(  # noqa: D102
        self, call: Call, tensor: torch.Tensor, operator: Operator, place: Allocate
    ) -> torch.Tensor:
        return self._pass(call, tensor, (), lambda engine, _: reduce_scatter(engine, tensor, operator, place))

    def broadcast(self, call: Call, tensor: torch.Tensor, src: int) -> None:  # noqa: D102
        self._pass(call, tensor, (), lambda engine, _: broadcast(engine, tensor, src))

    def all_gather(self, call: Call, rows: torch.Tensor, place: Allocate) -> torch.Tensor:  # noqa: D102
        return self._pass(call, rows, (len(rows),), lambda engine, told: all_gather(engine, told, rows, place))

    def gather(  # noqa: D102
        self, call: Call, rows: torch.Tensor, dst: int, place: Allocate
    ) -> torch.Tensor | None:
        return self._pass(call, rows, (len(rows),), lambda engine, told: gather(engine, told, rows, dst, place))

    def scatter(  # noqa: D102
        self, call: Call, tensor: torch.Tensor | None, src: int, place: AllocateAny
    ) -> torch.Tensor:
        device = self._host.device
        facts = scatter_facts(tensor, device)
        return self._pass(call, None, facts, lambda engine, told: scatter(engine, told, tensor, src, device, place))

    def all_to_all(  # noqa: D102
        self, call: Call, rows: torch.Tensor, splits: Sequence[int] | None, place: Allocate
    ) -> Gathered:
        parts = rows.tensor_split(len(self._ranks)) if splits is None else torch.split(rows, list(splits))
        facts = [len(part) for part in parts]
        return self._pass(call, rows, facts, lambda engine, told: all_to_all(engine, told, parts, rows, place))

    def barrier(self, call: Call) -> None:
        """Blocks until all ranks have called it and each rank's GPU has run its queued work."""

        def run() -> None:
            self._host.finish_queued()
            self._agree(call, ())

        self._in_turn(call, run)

    def empty(self, call: Call, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:  # noqa: D102
        self._in_turn(call, lambda: self._agree(call, ()))
        return new_tensor(tuple(shape), dtype)

    def close(self) -> None:
        """Takes the process group apart, if there is one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _pass(
        self, call: Call, tensor: torch.Tensor | None, facts: Sequence[int], act: Callable[[Engine, Facts], T]
    ) -> T:
        """Does an operation on tensors when it is its turn, once all ranks have agreed on it."""
        where = "cpu" if tensor is None else tensor.device.type
        if where != "cpu":  # ranks that differ in this would be in two engines
            call = call._replace(operation=f"{call.operation} on {where}")

        def run() -> T:
            told = self._agree(call, facts)
            try:
                engine = self._engine = self._engine or self._host.open(self._context, self._ranks, call)
                seconds = call.deadline - self._host.now()
                with engine.limited(
                    seconds, lambda: self._host.check_liveness(call.deadline, self._context, self._ranks)
                ):
                    return act(engine, told)
            except EngineFailed as failure:
                _forget_operation(failure)
                self._host.explain(failure, call, self._context, self._ranks)

        return self._in_turn(call, run)

    def _in_turn(self, call: Call, act: Callable[[], T]) -> T:
        number = call.sequence
        if not self._turnstile.is_open_to(number):
            self._turnstile.enter(number, lambda: self._host.check_liveness(call.deadline, self._context, self._ranks))
        try:
            self._host.check(self._context)
            if self._interrupted is not None:
                raise PeerFailed(self._host.rank, f"its operation #{self._interrupted} was interrupted")
            return act()
        except BaseException:
            self._interrupted = self._interrupted or number
            # The connections end with the engine, so the operation fails on the other ranks as well.
            self.close()
            raise
        finally:
            self._turnstile.leave(number)


def _forget_operation(failure: BaseException) -> None:
    """Clears the frames of an error's traceback: their operation would keep the connections open."""
    error: BaseException | None = failure
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
