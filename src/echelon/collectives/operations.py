"""The collectives: each a function from its arguments to what ranks compare and what this rank does.

Nothing here waits or sends by itself; the group gives an `Operation` a channel to act over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from echelon.backends.memory import describe
from echelon.collectives import algorithms
from echelon.collectives.operators import accumulation_dtype, operator
from echelon.collectives.run import Channel, run
from echelon.errors import CollectiveMismatch, SizeMismatch

T = TypeVar("T")
Chunks = list[Tensor | None]


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
        wide = _widen(tensor).contiguous()
        chunks: Chunks = list(wide.view(-1).tensor_split(channel.num_ranks))
        run(algorithms.ring_all_reduce(channel.num_ranks), channel, chunks, reduction.combine)
        return _keep(tensor, reduction.finish(wide, channel.num_ranks))

    return Operation(f"all_reduce({op}) of {describe(tensor.shape, tensor.dtype)}", act)


def reduce(tensor: Tensor, dst: int, op: str) -> Operation[Tensor]:
    """Combines `tensor` over all ranks, in place on rank `dst`; on others it stays as it is."""
    reduction = operator(op, tensor.dtype)

    def act(channel: Channel) -> Tensor:
        wide = _widen(tensor).contiguous().clone()
        run(algorithms.binomial_reduce(channel.num_ranks, dst), channel, [wide], reduction.combine)
        return _keep(tensor, reduction.finish(wide, channel.num_ranks)) if channel.rank == dst else tensor

    return Operation(f"reduce({op}, dst={dst}) of {describe(tensor.shape, tensor.dtype)}", act)


def broadcast(tensor: Tensor, src: int) -> Operation[Tensor]:
    """Overwrites `tensor` with that of rank `src`, in place."""

    def act(channel: Channel) -> Tensor:
        flat = tensor.detach().contiguous()
        run(algorithms.binomial_broadcast(channel.num_ranks, src), channel, [flat])
        return _keep(tensor, flat) if channel.rank != src else tensor

    return Operation(f"broadcast(src={src}) of {describe(tensor.shape, tensor.dtype)}", act)


def all_gather(tensor: Tensor) -> Operation[Tensor]:
    """Returns the tensors of all ranks, concatenated along dim 0."""
    rows = _rows(tensor)

    def act(channel: Channel) -> Tensor:
        chunks: Chunks = [None] * channel.num_ranks
        chunks[channel.rank] = rows.contiguous()
        run(algorithms.ring_all_gather(channel.num_ranks), channel, chunks)
        return _join(chunks)

    return Operation(f"all_gather of {_kind(rows)}", act)


def gather(tensor: Tensor, dst: int) -> Operation[Tensor | None]:
    """Returns the tensors of all ranks, concatenated along dim 0, on rank `dst`; None on others."""
    rows = _rows(tensor)

    def act(channel: Channel) -> Tensor | None:
        chunks: Chunks = [None] * channel.num_ranks
        chunks[channel.rank] = rows.contiguous()
        run(algorithms.direct_gather(channel.num_ranks, dst), channel, chunks)
        return _join(chunks) if channel.rank == dst else None

    return Operation(f"gather(dst={dst}) of {_kind(rows)}", act)


def scatter(tensor: Tensor | None, src: int) -> Operation[Tensor]:
    """Returns this rank's part of the tensor of rank `src`."""

    def act(channel: Channel) -> Tensor:
        chunks: Chunks = [None] * channel.num_ranks
        if channel.rank == src:
            assert tensor is not None
            chunks[:] = [part.contiguous() for part in tensor.detach().tensor_split(channel.num_ranks)]
        run(algorithms.direct_scatter(channel.num_ranks, src), channel, chunks)
        part = chunks[channel.rank]
        assert part is not None
        return part.clone() if channel.rank == src else part

    return Operation(f"scatter(src={src})", act)


def reduce_scatter(tensor: Tensor, op: str) -> Operation[Tensor]:
    """Combines `tensor` over all ranks and returns this rank's part of the result."""
    reduction = operator(op, tensor.dtype)

    def act(channel: Channel) -> Tensor:
        parts = _widen(tensor).tensor_split(channel.num_ranks)
        chunks: Chunks = [part.contiguous().clone() for part in parts]
        run(algorithms.ring_reduce_scatter(channel.num_ranks), channel, chunks, reduction.combine)
        part = chunks[channel.rank]
        assert part is not None
        return reduction.finish(part, channel.num_ranks).to(tensor.dtype)

    return Operation(f"reduce_scatter({op}) of {describe(tensor.shape, tensor.dtype)}", act)


def all_to_all(tensor: Tensor, in_splits: Sequence[int] | None, out_splits: Sequence[int] | None) -> Operation[Tensor]:
    """Sends part r of `tensor` to every rank r, and returns the parts that came, concatenated along dim 0."""
    rows = _rows(tensor)

    def act(channel: Channel) -> Tensor:
        parts = rows.tensor_split(channel.num_ranks) if in_splits is None else torch.split(rows, list(in_splits))
        chunks: Chunks = [*(part.contiguous() for part in parts), *([None] * channel.num_ranks)]
        run(algorithms.pairwise_all_to_all(channel.num_ranks), channel, chunks)
        came = chunks[channel.num_ranks :]
        sizes = [len(chunk) for chunk in came if chunk is not None]
        if out_splits is not None and sizes != list(out_splits):
            raise CollectiveMismatch(f"out_splits={list(out_splits)}, but the ranks sent {sizes} rows: make them agree")
        return _join(came)

    return Operation(f"all_to_all of {_kind(rows)}", act)


def barrier() -> Operation[None]:
    """Returns when all ranks have come."""

    def act(channel: Channel) -> None:
        token = torch.empty(0, dtype=torch.uint8, device="cpu")
        run(algorithms.dissemination_barrier(channel.num_ranks), channel, [token])

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


def _join(chunks: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([chunk for chunk in chunks if chunk is not None])
