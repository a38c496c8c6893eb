"""Executor of collectives as plans over messages, for groups without shared memory or an engine.

A rank learns the number of rows of other ranks when these arrive. The result is allocated for as many rows as this rank
has, and parts that fit are received in place. Rows are copied only if ranks differ.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from echelon.backends.base import Backend
from echelon.backends.collective import Collective, CollectiveExecutor, Run, can_hold, result_buffer
from echelon.backends.memory import is_plain, plain, without_class
from echelon.backends.modes import overwrite
from echelon.backends.operators import Combine, Operator, accumulation_dtype
from echelon.collectives.calls.chunks import Chunks, FlatChunks, ReadOnlyChunks, RowChunks, even_sizes
from echelon.collectives.calls.run import Channel, run
from echelon.collectives.plans import select
from echelon.collectives.plans.algorithms import OPERATIONS
from echelon.collectives.plans.select import Choice, Selector
from echelon.operation_records import OperationRecord

_VARIABLES = {operation: select.variable_of(operation) for operation in OPERATIONS}
_PACKED = torch.contiguous_format


class PlannedExecutor(CollectiveExecutor):
    """Executor whose collectives follow plans, over messages or as if there were some."""

    selector: Selector
    """Selector of the group's algorithms. The group sets it before the first collective."""


class PlanExecutor(PlannedExecutor):
    """Collectives of one group on one rank, over a backend's messages."""

    def __init__(self, backend: Backend, ranks: Sequence[int], context: int) -> None:
        """Sends nothing yet.

        Args:
            backend: Transport of the messages.
            ranks: The backend's rank of each member.
            context: Number that separates this group's messages from those of other groups.
        """
        self._backend = backend
        self._ranks = ranks
        self._rank = ranks.index(backend.rank)
        self._context = context

    def prepare(self, collective: Collective) -> Run:  # noqa: D102
        return partial(self._run, _PARTS[collective.kind](collective), collective)

    def _run(
        self, part: _Part, collective: Collective, record: OperationRecord, tensor: Tensor | None, out: Tensor | None
    ) -> Any:
        channel = Channel(self._backend, self._ranks, self._rank, self._context, record, self.selector)
        with torch.no_grad():
            return part(channel, collective, tensor, out)


def run_plan(
    channel: Channel,
    operation: str,
    chunks: Callable[[int], Chunks],
    num_bytes: int = 0,
    root: int = 0,
    combine: Combine | None = None,
) -> None:
    """Selects an algorithm for an operation and runs its plan. Blocks until it is done.

    `chunks` is called with the number of chunks of the plan.
    """
    algorithm, plan = choose(channel.selector, operation, num_bytes, root)
    # The algorithm is in the note, so that ranks compare that as well.
    channel.note += f" by {algorithm}"
    run(plan, channel, chunks(plan.num_chunks), combine)


_Part: TypeAlias = Callable[[Channel, Collective, Any, Tensor | None], Any]
"""This rank's part of a collective. Blocks until it is done."""


def choose(selector: Selector, operation: str, num_bytes: int, root: int) -> Choice:
    """Selects an algorithm for an operation, by the user's environment first."""
    # Read for every call, so a program can change the variable between two calls.
    return selector.choose(operation, num_bytes, root, os.environ.get(_VARIABLES[operation], ""))


# Tensors of equal shape


def _all_reduce(reduction: Operator, channel: Channel, _: Collective, tensor: Tensor, __: Tensor | None) -> Tensor:
    wide = _widen(tensor)
    flat = wide.view(-1)
    run_plan(channel, "all_reduce", partial(FlatChunks.equal, flat), tensor.nbytes, combine=reduction.combine)
    return _keep(tensor, reduction.finish(wide, channel.num_ranks))


def _reduce(reduction: Operator, channel: Channel, collective: Collective, tensor: Tensor, _: Tensor | None) -> Tensor:
    dst = collective.root
    wide = _widen(tensor)
    flat = wide.view(-1)
    if channel.rank == dst:
        run_plan(channel, "reduce", partial(FlatChunks.equal, flat), tensor.nbytes, dst, reduction.combine)
        return _keep(tensor, reduction.finish(wide, channel.num_ranks))

    def chunks(count: int) -> Chunks:
        # Only `dst` may change its tensor.
        return ReadOnlyChunks(flat, even_sizes(flat.numel(), count))

    run_plan(channel, "reduce", chunks, tensor.nbytes, dst, reduction.combine)
    return tensor


def _broadcast(channel: Channel, collective: Collective, tensor: Tensor, _: Tensor | None) -> Tensor:
    is_source = channel.rank == collective.root
    # Receivers write into the tensor itself if it is contiguous memory, else into a copy.
    whole = plain(tensor) if is_source or is_plain(tensor) else torch.empty_like(tensor, memory_format=_PACKED)
    run_plan(channel, "broadcast", partial(FlatChunks.equal, whole.view(-1)), tensor.nbytes, collective.root)
    return tensor if is_source else _keep(tensor, whole)


def _reduce_scatter(reduction: Operator, channel: Channel, _: Collective, tensor: Tensor, out: Tensor | None) -> Tensor:
    own = channel.rank
    num_rows, *row = tensor.shape
    rows = even_sizes(num_rows, channel.num_ranks)
    shape = (rows[own], *row)
    place = out if out is not None and can_hold(out, shape, tensor) else None
    wide = _widen(tensor).view(-1)
    # In a wider accumulation dtype the part cannot be combined in `out` itself, and is copied at the end.
    last = plain(place).view(-1) if place is not None and wide.dtype == tensor.dtype else None
    parts = ReadOnlyChunks(wide, [size * math.prod(row) for size in rows], own, last)
    run_plan(channel, "reduce_scatter", lambda _: parts, tensor.nbytes, combine=reduction.combine)
    part = reduction.finish(parts.take(own), channel.num_ranks).view(shape)
    return part.to(tensor.dtype) if place is None else _keep(place, part)


def _barrier(channel: Channel, _: Collective, __: None, ___: Tensor | None) -> None:
    run_plan(channel, "barrier", lambda count: RowChunks(count, {}))


def _empty(_: Channel, collective: Collective, __: None, ___: Tensor | None) -> Tensor:
    return collective.empty()


def _widen(tensor: Tensor) -> Tensor:
    """Returns the values to combine: contiguous, in the accumulation dtype. The tensor itself if it is both already."""
    # Contiguous before it is converted, as on the other ranks: element by element torch gives other bits of NaN.
    return tensor.contiguous().to(accumulation_dtype(tensor.dtype))


def _keep(tensor: Tensor, result: Tensor) -> Tensor:
    """Copies the result into the caller's tensor, unless it is there already, and returns that tensor."""
    if result.data_ptr() != tensor.data_ptr() or result.dtype != tensor.dtype:
        # Converted before it is spread out, see `_widen`.
        overwrite(tensor, result if tensor.is_contiguous() else result.to(tensor.dtype))
    return tensor


# Tensors with any number of rows, which are concatenated along dim 0


def _all_gather(channel: Channel, _: Collective, rows: Tensor, out: Tensor | None) -> Tensor:
    result = _Result(rows, [len(rows)] * channel.num_ranks, out)
    chunks = RowChunks(channel.num_ranks, {channel.rank: result.put(channel.rank, plain(rows))}, result.places)
    run_plan(channel, "all_gather", lambda _: chunks)
    return result.of([chunks[rank] for rank in range(channel.num_ranks)])


def _gather(channel: Channel, collective: Collective, rows: Tensor, out: Tensor | None) -> Tensor | None:
    dst = collective.root
    if channel.rank != dst:
        given = RowChunks(channel.num_ranks, {channel.rank: plain(rows)})
        run_plan(channel, "gather", lambda _: given, root=dst)
        return None
    result = _Result(rows, [len(rows)] * channel.num_ranks, out)
    chunks = RowChunks(channel.num_ranks, {dst: result.put(dst, plain(rows))}, result.places)
    run_plan(channel, "gather", lambda _: chunks, root=dst)
    return result.of([chunks[rank] for rank in range(channel.num_ranks)])


def _scatter(channel: Channel, collective: Collective, tensor: Tensor | None, _: Tensor | None) -> Tensor:
    src = collective.root
    given: dict[int, Tensor] = {}
    if channel.rank == src:
        assert tensor is not None
        given = dict(enumerate(without_class(plain(tensor)).tensor_split(channel.num_ranks)))
    chunks = RowChunks(channel.num_ranks, given)
    run_plan(channel, "scatter", lambda _: chunks, root=src)
    part = chunks[channel.rank]
    # A view would keep the whole memory of the source's tensor, or of a message with other ranks' parts.
    is_alone = channel.rank != src and part.untyped_storage().nbytes() == part.nbytes
    return part if is_alone else part.clone()


def _all_to_all(channel: Channel, collective: Collective, rows: Tensor, out: Tensor | None) -> Tensor:
    ranks = range(channel.num_ranks)
    sends = list(collective.in_splits or even_sizes(len(rows), channel.num_ranks))
    expected = list(collective.out_splits or [sends[channel.rank] for _ in ranks])
    result = _Result(rows, expected, out)
    # Chunks 0 to p - 1 are sent, chunks p to 2p - 1 received; see `pairwise_all_to_all`.
    places = {channel.num_ranks + src: place for src, place in result.places.items()}
    chunks = RowChunks(2 * channel.num_ranks, dict(enumerate(torch.split(plain(rows), sends))), places)
    run_plan(channel, "all_to_all", lambda _: chunks)
    came = [chunks[channel.num_ranks + src] for src in ranks]
    collective.check_counts([len(chunk) for chunk in came], channel.record)
    return result.of(came)


def _broadcast_rows(channel: Channel, collective: Collective, rows: Tensor, _: Tensor | None) -> Tensor:
    """Returns the rows of the source. Other ranks pass no rows, and learn the number when they arrive."""
    made: list[RowChunks] = []

    def chunks(count: int) -> RowChunks:
        parts = rows.tensor_split(count) if channel.rank == collective.root else ()
        made.append(RowChunks(count, dict(enumerate(parts))))
        return made[0]

    run_plan(channel, "broadcast", chunks, root=collective.root)
    return torch.cat([made[0][number] for number in range(len(made[0]))])


# The operator is looked up when a collective is prepared. An error comes before the collective has a number.
_PARTS: Mapping[str, Callable[[Collective], _Part]] = {
    "all_reduce": lambda collective: partial(_all_reduce, collective.reduction),
    "reduce": lambda collective: partial(_reduce, collective.reduction),
    "reduce_scatter": lambda collective: partial(_reduce_scatter, collective.reduction),
    "broadcast": lambda _: _broadcast,
    "all_gather": lambda _: _all_gather,
    "gather": lambda _: _gather,
    "scatter": lambda _: _scatter,
    "all_to_all": lambda _: _all_to_all,
    "broadcast_rows": lambda _: _broadcast_rows,
    "barrier": lambda _: _barrier,
    "empty": lambda _: _empty,
}


class _Result:
    """Buffer for the rows of all ranks."""

    def __init__(self, rows: Tensor, sizes: Sequence[int], out: Tensor | None) -> None:
        """Allocates room for `sizes` rows of each rank, of the shape and dtype of `rows`: in `out` if it fits."""
        shape = (sum(sizes), *rows.shape[1:])
        self._out = out
        self._buffer: Tensor | None = None
        self.places: Mapping[int, Tensor] = {}
        """Views of the buffer for the rows of each rank, if they are as many as expected."""
        if out is None or can_hold(out, shape, rows):
            self._buffer = result_buffer(out, shape, rows)
            self.places = dict(enumerate(torch.split(self._buffer, list(sizes))))

    def put(self, rank: int, part: Tensor) -> Tensor:
        """Copies a rank's rows into the buffer, if there is one, and returns them there."""
        place = self.places.get(rank)
        return part if place is None else place.copy_(part)

    def of(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the rows of all ranks as one tensor."""
        # Fast path: all parts have the expected sizes, and most were received in place.
        if self._buffer is not None and all(part.shape == self.places[rank].shape for rank, part in enumerate(parts)):
            for rank, part in enumerate(parts):
                if part.data_ptr() != self.places[rank].data_ptr():
                    self.places[rank].copy_(part)
            return self._buffer
        shape = (sum(map(len, parts)), *parts[0].shape[1:])
        out = self._out
        if out is not None and self._buffer is None and all(can_hold(out, shape, part) for part in parts):
            return torch.cat(list(parts), out=plain(out))
        return torch.cat(list(parts))
