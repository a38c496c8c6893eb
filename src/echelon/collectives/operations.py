"""The collectives: each a function from its arguments to what ranks compare and what this rank does.

Nothing here waits or sends by itself; the group gives an `Operation` a channel to act over.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from echelon.backends.memory import describe
from echelon.backends.operators import Combine, accumulation_dtype, operator
from echelon.collectives import select
from echelon.collectives.algorithms import OPERATIONS
from echelon.collectives.chunks import Chunks, Parts, Tensors
from echelon.collectives.run import Channel, run
from echelon.errors import CollectiveMismatch, SizeMismatch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """One call of a collective."""

    note: str
    """What must be equal on all ranks, as text."""
    act: Callable[[Channel], T]
    """Does this rank's part over a channel."""


def all_reduce(tensor: Tensor, op: str) -> Operation[Tensor]:
    """Combines `tensor` over all ranks, in place."""
    reduction = operator(op, tensor.dtype)

    def act(channel: Channel) -> Tensor:
        if channel.native is not None:
            channel.native.all_reduce(channel, tensor.detach(), reduction)
            return tensor
        wide = _widen(tensor).contiguous()
        _run(
            "all_reduce", channel, lambda count: Parts.equal(wide.view(-1), count), tensor.nbytes, 0, reduction.combine
        )
        return _keep(tensor, reduction.finish(wide, channel.num_ranks))

    return Operation(f"all_reduce({op}) of {describe(tensor.shape, tensor.dtype)}", act)


def reduce(tensor: Tensor, dst: int, op: str) -> Operation[Tensor]:
    """Combines `tensor` over all ranks, in place on rank `dst`; on others it stays as it is."""
    reduction = operator(op, tensor.dtype)

    def act(channel: Channel) -> Tensor:
        wide = _widen(tensor).contiguous().clone()
        _run("reduce", channel, lambda count: Parts.equal(wide.view(-1), count), tensor.nbytes, dst, reduction.combine)
        return _keep(tensor, reduction.finish(wide, channel.num_ranks)) if channel.rank == dst else tensor

    return Operation(f"reduce({op}, dst={dst}) of {describe(tensor.shape, tensor.dtype)}", act)


def broadcast(tensor: Tensor, src: int) -> Operation[Tensor]:
    """Overwrites `tensor` with that of rank `src`, in place."""

    def act(channel: Channel) -> Tensor:
        flat = tensor.detach().contiguous()
        _run("broadcast", channel, lambda count: Parts.equal(flat.view(-1), count), tensor.nbytes, src)
        return _keep(tensor, flat) if channel.rank != src else tensor

    return Operation(f"broadcast(src={src}) of {describe(tensor.shape, tensor.dtype)}", act)


def all_gather(tensor: Tensor) -> Operation[Tensor]:
    """Returns the tensors of all ranks, concatenated along dim 0."""
    rows = _rows(tensor)

    def act(channel: Channel) -> Tensor:
        chunks = Tensors(channel.num_ranks, {channel.rank: rows.contiguous()})
        _run("all_gather", channel, lambda _: chunks)
        return torch.cat([chunks[rank] for rank in range(channel.num_ranks)])

    return Operation(f"all_gather of {_kind(rows)}", act)


def gather(tensor: Tensor, dst: int) -> Operation[Tensor | None]:
    """Returns the tensors of all ranks, concatenated along dim 0, on rank `dst`; None on others."""
    rows = _rows(tensor)

    def act(channel: Channel) -> Tensor | None:
        chunks = Tensors(channel.num_ranks, {channel.rank: rows.contiguous()})
        _run("gather", channel, lambda _: chunks, root=dst)
        return torch.cat([chunks[rank] for rank in range(channel.num_ranks)]) if channel.rank == dst else None

    return Operation(f"gather(dst={dst}) of {_kind(rows)}", act)


def scatter(tensor: Tensor | None, src: int) -> Operation[Tensor]:
    """Returns this rank's part of the tensor of rank `src`."""

    def act(channel: Channel) -> Tensor:
        given: dict[int, Tensor] = {}
        if channel.rank == src:
            assert tensor is not None
            given = _numbered(tensor.detach().tensor_split(channel.num_ranks))
        chunks = Tensors(channel.num_ranks, given)
        _run("scatter", channel, lambda _: chunks, root=src)
        part = chunks[channel.rank]
        return part.clone() if channel.rank == src else part

    return Operation(f"scatter(src={src})", act)


def reduce_scatter(tensor: Tensor, op: str) -> Operation[Tensor]:
    """Combines `tensor` over all ranks and returns this rank's part of the result."""
    reduction = operator(op, tensor.dtype)

    def act(channel: Channel) -> Tensor:
        wide = _widen(tensor).contiguous()
        own = wide.clone() if wide.data_ptr() == tensor.data_ptr() else wide
        views = own.tensor_split(channel.num_ranks)
        parts = Parts(own.view(-1), [view.numel() for view in views])
        _run("reduce_scatter", channel, lambda _: parts, tensor.nbytes, 0, reduction.combine)
        return reduction.finish(views[channel.rank], channel.num_ranks).to(tensor.dtype, copy=True)

    return Operation(f"reduce_scatter({op}) of {describe(tensor.shape, tensor.dtype)}", act)


def all_to_all(tensor: Tensor, in_splits: Sequence[int] | None, out_splits: Sequence[int] | None) -> Operation[Tensor]:
    """Sends part r of `tensor` to every rank r, and returns the parts that came, concatenated along dim 0."""
    rows = _rows(tensor)

    def act(channel: Channel) -> Tensor:
        parts = rows.tensor_split(channel.num_ranks) if in_splits is None else torch.split(rows, list(in_splits))
        chunks = Tensors(2 * channel.num_ranks, _numbered(parts))
        _run("all_to_all", channel, lambda _: chunks)
        came = [chunks[channel.num_ranks + src] for src in range(channel.num_ranks)]
        sizes = [len(chunk) for chunk in came]
        if out_splits is not None and sizes != list(out_splits):
            raise CollectiveMismatch(f"out_splits={list(out_splits)}, but the ranks sent {sizes} rows: make them agree")
        return torch.cat(came)

    return Operation(f"all_to_all of {_kind(rows)}", act)


def barrier() -> Operation[None]:
    """Returns when all ranks have come."""

    def act(channel: Channel) -> None:
        _run("barrier", channel, lambda count: Tensors(count, {}))

    return Operation("barrier", act)


def write_out(out: Tensor, result: Tensor, note: str) -> Tensor:
    """Copies a result into the tensor that the caller gave for it.

    Raises:
        SizeMismatch: it has another shape or dtype.
    """
    if out.shape != result.shape or out.dtype != result.dtype:
        raise SizeMismatch(describe(result.shape, result.dtype), describe(out.shape, out.dtype), f"{note}, out=")
    out.detach().copy_(result)
    return out


def _run(
    operation: str,
    channel: Channel,
    chunks: Callable[[int], Chunks],
    num_bytes: int = 0,
    root: int = 0,
    combine: Combine | None = None,
) -> None:
    """Runs an operation by the algorithm that is chosen for it. `chunks` makes as many as the plan has."""
    if channel.native is not None:
        channel.native.agree(channel)
    overruled = os.environ.get(_VARIABLES[operation], "")
    algorithm, plan = channel.selector.choose(operation, num_bytes, root, overruled)
    run(plan, channel.by(algorithm), chunks(plan.num_chunks), combine)


_VARIABLES = {operation: select.variable_of(operation) for operation in OPERATIONS}


def _numbered(parts: Sequence[Tensor]) -> dict[int, Tensor]:
    return {number: part.contiguous() for number, part in enumerate(parts)}


def _widen(tensor: Tensor) -> Tensor:
    return tensor.detach().to(accumulation_dtype(tensor.dtype))


def _keep(tensor: Tensor, result: Tensor) -> Tensor:
    """Writes the result into the caller's tensor, unless it is there already."""
    if result.data_ptr() != tensor.data_ptr() or result.dtype != tensor.dtype:
        tensor.detach().copy_(result)
    return tensor


def _rows(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.dim() else tensor.detach().reshape(1)


def _kind(rows: Tensor) -> str:
    """What tensors must have in common to be concatenated."""
    return f"rows of {describe(rows.shape[1:], rows.dtype)}"
