"""Collectives on tensors of equal shape: functions from the arguments of a call to an `Operation`.

Nothing here waits or sends by itself. The group runs an `Operation` by giving it a channel or a backend's own
collectives.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from echelon.backends.memory import describe, is_plain, new_tensor, plain
from echelon.backends.modes import outside_autograd, overwrite
from echelon.backends.native import Allocate, Call, NativeCollectives
from echelon.backends.operators import Combine, Operator, accumulation_dtype, check_op, operator
from echelon.collectives.calls.chunks import Chunks, FlatChunks, ReadOnlyChunks, RowChunks, even_sizes
from echelon.collectives.calls.run import Channel, run
from echelon.collectives.plans import select
from echelon.collectives.plans.algorithms import OPERATIONS
from echelon.errors import SizeMismatch

S = TypeVar("S")
T = TypeVar("T")


class Operation(NamedTuple, Generic[T]):
    """Call of a collective on this rank, ready to run."""

    note: str
    """Text that must be equal on all ranks: the operation and its arguments."""
    act: Callable[[Channel], T]
    """Runs this rank's part by messages over a channel. Blocks until it is done."""
    native: Callable[[NativeCollectives, Call], T]
    """Runs it by the backend's own collectives, if it has them."""
    num_bytes: int = 0
    """Size of this rank's tensor."""


def derived(make: Callable[[], Operation[S]], finish: Callable[[S], T], note: str, num_bytes: int) -> Operation[T]:
    """Returns an operation that makes and runs another operation, and maps its result by `finish`.

    `make` is called only when the operation runs.
    """

    def act(channel: Channel) -> T:
        return finish(make().act(channel))

    def native(collectives: NativeCollectives, call: Call) -> T:
        return finish(make().native(collectives, call))

    return Operation(note, act, native, num_bytes)


def all_reduce(tensor: Tensor, op: str) -> Operation[Tensor]:
    """Returns the operation that combines `tensor` over all ranks, in place."""
    op = check_op(op)
    note, reduction = _known_reduction(f"all_reduce({op})", op, tensor.shape, tensor.dtype)

    def act(channel: Channel) -> Tensor:
        wide = _widen(tensor)
        flat = wide.view(-1)
        run_plan(
            "all_reduce", channel, lambda count: FlatChunks.equal(flat, count), tensor.nbytes, combine=reduction.combine
        )
        return _keep(tensor, reduction.finish(wide, channel.num_ranks))

    def native(collectives: NativeCollectives, call: Call) -> Tensor:
        values = _resolved(tensor)
        collectives.all_reduce(call, values, reduction)
        return tensor if values is tensor else _keep(tensor, values)

    return Operation(note, act, native, tensor.nbytes)


def reduce(tensor: Tensor, dst: int, op: str) -> Operation[Tensor]:
    """Returns the operation that combines `tensor` over all ranks, in place on rank `dst`, unchanged on others."""
    op = check_op(op)
    note, reduction = _known_reduction(f"reduce({op}, dst={dst})", op, tensor.shape, tensor.dtype)

    def act(channel: Channel) -> Tensor:
        wide = _widen(tensor)
        flat = wide.view(-1)

        def chunks(count: int) -> Chunks:
            if channel.rank == dst:
                return FlatChunks.equal(flat, count)
            # Only `dst` may change its tensor.
            return ReadOnlyChunks(flat, even_sizes(flat.numel(), count))

        run_plan("reduce", channel, chunks, tensor.nbytes, dst, reduction.combine)
        return _keep(tensor, reduction.finish(wide, channel.num_ranks)) if channel.rank == dst else tensor

    def native(collectives: NativeCollectives, call: Call) -> Tensor:
        values = _resolved(tensor)
        collectives.reduce(call, values, dst, reduction)
        return _keep(tensor, values)

    return Operation(note, act, native, tensor.nbytes)


def broadcast(tensor: Tensor, src: int) -> Operation[Tensor]:
    """Returns the operation that overwrites `tensor` with the tensor of rank `src`."""

    def act(channel: Channel) -> Tensor:
        is_source = channel.rank == src
        # Receivers write into the tensor itself if it is contiguous memory, else into a copy.
        whole = plain(tensor) if is_source or is_plain(tensor) else torch.empty_like(tensor, memory_format=_PACKED)
        flat = whole.view(-1)
        run_plan("broadcast", channel, lambda count: FlatChunks.equal(flat, count), tensor.nbytes, src)
        return tensor if is_source else _keep(tensor, whole)

    def native(collectives: NativeCollectives, call: Call) -> Tensor:
        values = _resolved(tensor)
        collectives.broadcast(call, values, src)
        return _keep(tensor, values)

    return Operation(f"broadcast(src={src}) of {describe(tensor.shape, tensor.dtype)}", act, native, tensor.nbytes)


def reduce_scatter(tensor: Tensor, op: str, out: Tensor | None = None) -> Operation[Tensor]:
    """Returns the operation that combines `tensor` and gives this rank its part, in `out` if it fits."""
    op = check_op(op)
    note, reduction = _known_reduction(f"reduce_scatter({op})", op, tensor.shape, tensor.dtype)

    def act(channel: Channel) -> Tensor:
        num_rows, *row = tensor.shape
        rows, own = even_sizes(num_rows, channel.num_ranks), channel.rank
        shape = (rows[own], *row)
        place = out if out is not None and can_hold(out, shape, tensor) else None
        wide = _widen(tensor).view(-1)
        # In a wider accumulation dtype the part cannot be combined in `out` itself, and is copied at the end.
        last = plain(place).view(-1) if place is not None and wide.dtype == tensor.dtype else None
        parts = ReadOnlyChunks(wide, [size * math.prod(row) for size in rows], own, last)
        run_plan("reduce_scatter", channel, lambda _: parts, tensor.nbytes, combine=reduction.combine)
        part = reduction.finish(parts.take(own), channel.num_ranks).view(shape)
        return part.to(tensor.dtype) if place is None else _keep(place, part)

    def native(collectives: NativeCollectives, call: Call) -> Tensor:
        return collectives.reduce_scatter(call, _resolved(tensor), reduction, place_of(out, tensor))

    return Operation(note, act, native, tensor.nbytes)


def barrier() -> Operation[None]:
    """Returns the operation that blocks until all ranks have called it."""

    def act(channel: Channel) -> None:
        run_plan("barrier", channel, lambda count: RowChunks(count, {}))

    def native(collectives: NativeCollectives, call: Call) -> None:
        collectives.barrier(call)

    return Operation("barrier", act, native)


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
    # The bytes of a strided tensor are not one range, so it must be in another storage.
    if not source.is_contiguous():
        return out.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
    start, other = out.data_ptr(), source.data_ptr()
    return start + out.nbytes <= other or other + source.nbytes <= start


def empty(shape: Sequence[int], dtype: torch.dtype) -> Operation[Tensor]:
    """Returns the operation that makes an uninitialized tensor, in memory that the ranks share if they have any."""
    shape = tuple(shape)

    def act(channel: Channel) -> Tensor:  # noqa: ARG001
        return new_tensor(shape, dtype)

    def native(collectives: NativeCollectives, call: Call) -> Tensor:
        return collectives.empty(call, shape, dtype)

    return Operation(f"empty of {describe(shape, dtype)}", act, native)


def place_of(out: Tensor | None, source: Tensor) -> Allocate:
    """Returns an allocator of results: `out` if it can hold the result, else a new tensor of the dtype of `source`."""

    def place(shape: Sequence[int]) -> Tensor:
        if out is not None and can_hold(out, shape, source):
            return plain(out)
        return new_tensor(tuple(shape), source.dtype, source.device)

    return place


def write_out(out: Tensor, result: Tensor, note: str) -> Tensor:
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


def run_plan(
    operation: str,
    channel: Channel,
    chunks: Callable[[int], Chunks],
    num_bytes: int = 0,
    root: int = 0,
    combine: Combine | None = None,
) -> None:
    """Selects an algorithm for an operation and runs its plan. Blocks until it is done.

    `chunks` is called with the number of chunks of the plan.
    """
    # Read for every call, so a program can change the variable between two calls.
    overruled = os.environ.get(_VARIABLES[operation], "")
    algorithm, plan = channel.selector.choose(operation, num_bytes, root, overruled)
    run(plan, channel.by(algorithm), chunks(plan.num_chunks), combine)


class _Reduction(NamedTuple):
    note: str
    operator: Operator


@lru_cache(1024)  # fast path: a training loop repeats the same calls
def _known_reduction(name: str, op: str, shape: torch.Size, dtype: torch.dtype) -> _Reduction:
    """Returns the text that ranks compare, and the operator."""
    return _Reduction(f"{name} of {describe(shape, dtype)}", operator(op, dtype))


_VARIABLES = {operation: select.variable_of(operation) for operation in OPERATIONS}
_PACKED = torch.contiguous_format


def _widen(tensor: Tensor) -> Tensor:
    """Returns the values to combine: contiguous, in the accumulation dtype. The tensor itself if it is both already."""
    dtype = accumulation_dtype(tensor.dtype)
    return plain(tensor) if dtype == tensor.dtype else tensor.detach().to(dtype, memory_format=_PACKED)


def _resolved(tensor: Tensor) -> Tensor:
    """Returns the values of a tensor for a backend's own collective: in its own memory, or a copy."""
    # The memory of a lazy conjugate or negative does not hold the values.
    if tensor.is_conj() or tensor.is_neg():
        return plain(tensor)
    return outside_autograd(tensor)


def _keep(tensor: Tensor, result: Tensor) -> Tensor:
    """Copies the result into the caller's tensor, unless it is there already, and returns that tensor."""
    if result.data_ptr() != tensor.data_ptr() or result.dtype != tensor.dtype:
        overwrite(tensor, result)
    return tensor
