"""Collectives of one group by an engine of torch.distributed.

Strategy. Operations pass one at a time, in the order of their calls, in any threads, because the engine pairs them by
their order alone. Each begins with an agreement, so the engine only sees ranks that make the same call. The first
operation opens the engine, when all ranks have come. An operation that fails closes it: the connections end, so the
operation fails on the other ranks as well.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist

from echelon.backends.collective import Collective, CollectiveExecutor, Run, received_buffer, result_buffer
from echelon.backends.formats.wire import Tag
from echelon.backends.lanes import CAUSE_SECONDS, InOrder, wait_for_news
from echelon.backends.memory import as_bytes, dtype_code, dtype_of
from echelon.backends.operators import Operator, accumulation_dtype
from echelon.backends.torch_distributed.agreement import Agreement
from echelon.backends.torch_distributed.engine import Engine, EngineFailed, Engines, Look
from echelon.backends.torch_distributed.engines import ENGINES
from echelon.backends.torch_distributed.store import PORT_SEQUENCE
from echelon.errors import PeerFailed
from echelon.operation_records import OperationRecord

Facts: TypeAlias = Sequence[Sequence[int]]
"""Facts of each rank, by rank, from the agreement."""

# Dtypes that every engine can add up.
_DTYPES = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8})
_OPS: Mapping[str, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def native_op(operator: Operator, dtype: torch.dtype) -> dist.ReduceOp.RedOpType | None:
    """Returns the engines' op for a reduction. None if an engine lacks it, or has another meaning of it."""
    # min and max of floats: whether a NaN stays depends on the order of the ranks there.
    if dtype not in _DTYPES or (operator.name in ("min", "max") and dtype.is_floating_point):
        return None
    return _OPS.get(operator.name)


class EngineExecutor(CollectiveExecutor):
    """Collectives of one group.

    8- and 16-bit floats are reduced as float32. For a reduction without a native op the engine only moves data: each
    rank gets its part of all tensors, and reduces it in the order of the ranks. Data moves as bytes, in any dtype.
    """

    def __init__(self, engines: Engines, context: int, ranks: tuple[int, ...], agree: Agreement) -> None:
        """Opens no engine yet.

        Args:
            engines: opens the engine.
            context: number of the group.
            ranks: the world's rank of each member.
            agree: makes the ranks agree on an operation before it begins.
        """
        self._engines = engines
        self._context = context
        self._ranks = ranks
        self._agree = agree
        self._order = InOrder()
        self._engine: Engine | None = None
        # Number of the first operation that failed.
        self._interrupted: int | None = None

    def prepare(self, collective: Collective) -> Run:  # noqa: D102
        if collective.op:
            _ = collective.reduction  # raises now, before the collective has a number
        # Ranks without rows gather none from each other, and all of the source's.
        kind = "all_gather" if collective.kind == "broadcast_rows" else collective.kind
        run = partial(getattr(self, f"_{kind}"), collective)
        return collective.checked(run) if kind == "all_to_all" else run

    # Reductions

    def _all_reduce(
        self, collective: Collective, call: OperationRecord, tensor: torch.Tensor, _: torch.Tensor | None
    ) -> torch.Tensor:
        operator = collective.reduction
        with self._agreed(call, tensor) as (engine, __):
            wide = _wide(tensor)
            flat = wide.view(-1)
            op = native_op(operator, flat.dtype)
            if op is not None:
                engine.all_reduce(flat, op)
                operator.finish(flat, engine.num_ranks)
            else:
                parts = flat.tensor_split(engine.num_ranks)
                own = _reduced_part(engine, parts, operator)
                engine.exchange([own] * engine.num_ranks, parts)
            return _keep(tensor, wide)

    def _reduce(
        self, collective: Collective, call: OperationRecord, tensor: torch.Tensor, _: torch.Tensor | None
    ) -> torch.Tensor:
        operator, dst = collective.reduction, collective.root
        with self._agreed(call, tensor) as (engine, __):
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
                own = _reduced_part(engine, parts, operator)
                nothing = own[:0]
                sends = [own if rank == dst else nothing for rank in range(engine.num_ranks)]
                engine.exchange(sends, parts if is_dst else [nothing] * engine.num_ranks)
            return _keep(tensor, wide) if is_dst else tensor

    def _reduce_scatter(
        self, collective: Collective, call: OperationRecord, tensor: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        operator = collective.reduction
        with self._agreed(call, tensor) as (engine, __):
            wide = _wide(tensor)
            parts = wide.tensor_split(engine.num_ranks)
            result = result_buffer(out, parts[engine.rank].shape, tensor)
            op = native_op(operator, wide.dtype)
            if op is not None and len(tensor) % engine.num_ranks == 0:
                own = result if result.dtype == wide.dtype else torch.empty_like(parts[engine.rank])
                engine.reduce_scatter(own.view(-1), wide.view(-1), op)
                operator.finish(own, engine.num_ranks)
            else:
                own = _reduced_part(engine, parts, operator)
            return _keep(result, own)

    # Data movement

    def _broadcast(
        self, collective: Collective, call: OperationRecord, tensor: torch.Tensor, _: torch.Tensor | None
    ) -> torch.Tensor:
        with self._agreed(call, tensor) as (engine, __):
            flat = tensor.contiguous()
            if flat.numel():
                engine.broadcast(as_bytes(flat), collective.root)
            return _keep(tensor, flat)

    def _all_gather(
        self, _: Collective, call: OperationRecord, rows: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        with self._agreed(call, rows, [len(rows)]) as (engine, told):
            counts = [facts[0] for facts in told]
            result = result_buffer(out, (sum(counts), *rows.shape[1:]), rows)
            if not result.numel():
                return result
            if len(set(counts)) == 1:
                engine.all_gather(as_bytes(result), as_bytes(rows.contiguous()))
                return result
            # Engines gather equal numbers only.
            places = torch.split(result, counts)
            places[engine.rank].copy_(rows)
            for src, part in enumerate(places):
                if part.numel():
                    engine.broadcast(as_bytes(part), src)
            return result

    def _gather(
        self, collective: Collective, call: OperationRecord, rows: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor | None:
        dst = collective.root
        with self._agreed(call, rows, [len(rows)]) as (engine, told):
            nothing = rows.new_empty(0)
            sends = [rows.contiguous() if rank == dst else nothing for rank in range(engine.num_ranks)]
            if engine.rank != dst:
                engine.exchange(sends, [nothing] * engine.num_ranks)
                return None
            counts = [facts[0] for facts in told]
            result = result_buffer(out, (sum(counts), *rows.shape[1:]), rows)
            engine.exchange(sends, torch.split(result, counts))
            return result

    def _scatter(
        self, collective: Collective, call: OperationRecord, tensor: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        src = collective.root
        # Only rank `src` knows these: whether the tensor is on the device, its dtype and its shape.
        own: list[int] = []
        if tensor is not None:
            own = [int(tensor.device.type == self._engines.device.type), dtype_code(tensor.dtype), *tensor.shape]
        with self._agreed(call, None, own) as (engine, told):
            is_on_device, code, num_rows, *row = told[src]
            where = self._engines.device if is_on_device else torch.device("cpu")
            count = len(range(engine.rank, num_rows, engine.num_ranks))  # as torch.tensor_split: first ranks get more
            part = received_buffer(out, (count, *row), dtype_of(code), where, tensor)
            nothing = part.new_empty(0)
            sends: Sequence[torch.Tensor] = [nothing] * engine.num_ranks
            if tensor is not None and engine.rank == src:
                sends = [piece.contiguous() for piece in tensor.tensor_split(engine.num_ranks)]
            engine.exchange(sends, [part if peer == src else nothing for peer in range(engine.num_ranks)])
            return part

    def _all_to_all(
        self, collective: Collective, call: OperationRecord, rows: torch.Tensor, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[int]]:
        splits = collective.in_splits
        parts = rows.tensor_split(len(self._ranks)) if splits is None else torch.split(rows, list(splits))
        with self._agreed(call, rows, [len(part) for part in parts]) as (engine, told):
            counts = [facts[engine.rank] for facts in told]
            result = result_buffer(out, (sum(counts), *rows.shape[1:]), rows)
            engine.exchange([part.contiguous() for part in parts], torch.split(result, counts))
            return result, counts

    # Without the engine

    def _barrier(self, _: Collective, call: OperationRecord, *__: object) -> None:
        # Also blocks until each rank's GPU has run its queued work.
        with self._turn(call):
            self._engines.finish_queued()
            self._agree(call, ())

    def _empty(self, collective: Collective, call: OperationRecord, *_: object) -> torch.Tensor:
        with self._turn(call):
            self._agree(call, ())
        return collective.empty()

    # Turns

    @contextmanager
    def _turn(self, call: OperationRecord) -> Iterator[Look]:
        """Waits for the turn of an operation. Closes the engine if the operation fails."""
        number = call.sequence
        look = partial(self._engines.check_liveness, call.deadline, self._context, self._ranks)
        if self._order.next != number:
            self._order.enter(number, look)
        try:
            self._engines.check(self._context)
            if self._interrupted is not None:
                wait_for_news(CAUSE_SECONDS, self._engines.now, look)
                raise PeerFailed(self._engines.rank, f"its operation #{self._interrupted} was interrupted")
            yield look
        except BaseException:
            self._interrupted = self._interrupted or number
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()
            raise
        finally:
            self._order.leave(number)

    @contextmanager
    def _agreed(
        self, call: OperationRecord, tensor: torch.Tensor | None, own: Sequence[int] = ()
    ) -> Iterator[tuple[Engine, Facts]]:
        """Waits until all ranks have agreed on an operation, and gives the engine and all ranks' facts to it.

        Args:
            call: the operation.
            tensor: this rank's tensor. None if only another rank has one.
            own: facts that the other ranks need from this rank.
        """
        if tensor is not None and tensor.device.type != "cpu":
            # Ranks with tensors on different devices would be in different engines.
            call = copy.copy(call)
            call.operation += f" on {tensor.device.type}"
        with self._turn(call) as look:
            told = self._agree(call, own)
            try:
                engine = self._engine = self._engine or self._engines.open(
                    f"{self._context:x}",
                    self._ranks,
                    ENGINES[self._engines.name],
                    call.deadline,
                    look,
                    Tag(self._context, PORT_SEQUENCE),
                )
                with engine.limited(call.deadline - self._engines.now(), look):
                    yield engine, told
            except EngineFailed as failure:
                raise self._engines.cause_of(failure, look, self._context, self._ranks) from failure


def _reduced_part(engine: Engine, parts: Sequence[torch.Tensor], operator: Operator) -> torch.Tensor:
    """Returns this rank's part, reduced over all ranks. `parts` split this rank's own tensor."""
    mine = parts[engine.rank]
    came = list(mine.new_empty((engine.num_ranks, *mine.shape)))
    engine.exchange([part.contiguous() for part in parts], came)
    for other in came[1:]:
        operator.combine(came[0], other)
    return operator.finish(came[0], engine.num_ranks)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as contiguous, in its accumulation dtype. The tensor itself if it is both already."""
    # Contiguous before it is converted, as on the other ranks: element by element torch gives other bits of NaN.
    return tensor.contiguous().to(accumulation_dtype(tensor.dtype))


def _keep(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Copies a result into the caller's tensor, unless it is there already, and returns that tensor."""
    if result.data_ptr() != tensor.data_ptr() or result.dtype != tensor.dtype:
        values = result.view(tensor.shape)
        # Converted before it is spread out, see `_wide`.
        tensor.copy_(values if tensor.is_contiguous() else values.to(tensor.dtype))
    return tensor
