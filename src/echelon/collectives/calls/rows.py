"""Collectives on tensors with any number of rows, which are concatenated along dim 0.

A rank learns the number of rows of other ranks when these arrive. The result is allocated for as many rows as this rank
has, and parts that fit are received in place. Rows are copied only if ranks differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from echelon.backends.memory import describe, is_plain, new_tensor, plain
from echelon.backends.modes import outside_autograd
from echelon.backends.native import Call, NativeCollectives
from echelon.collectives.calls.chunks import RowChunks, even_sizes
from echelon.collectives.calls.operations import Operation, can_hold, place_of, run_plan
from echelon.collectives.calls.run import Channel
from echelon.errors import CollectiveMismatch


def all_gather(tensor: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
    """Returns the operation that concatenates the tensors of all ranks along dim 0, in `out` if it fits."""
    rows = _rows(tensor)

    def act(channel: Channel) -> Tensor:
        result = _Result(rows, [len(rows)] * channel.num_ranks, out)
        chunks = RowChunks(channel.num_ranks, {channel.rank: result.put(channel.rank, plain(rows))}, result.places)
        run_plan("all_gather", channel, lambda _: chunks)
        return result.of([chunks[rank] for rank in range(channel.num_ranks)])

    def native(collectives: NativeCollectives, call: Call) -> Tensor:
        return collectives.all_gather(call, plain(rows), place_of(out, rows))

    return Operation(_note("all_gather", rows.shape, rows.dtype), act, native, rows.nbytes)


def gather(tensor: Tensor, dst: int, out: Tensor | None = None) -> Operation[Tensor | None]:
    """Returns the operation that concatenates the tensors of all ranks on rank `dst`, in `out` if it fits.

    Its result is None on other ranks.
    """
    rows = _rows(tensor)

    def act(channel: Channel) -> Tensor | None:
        if channel.rank != dst:
            given = RowChunks(channel.num_ranks, {channel.rank: plain(rows)})
            run_plan("gather", channel, lambda _: given, root=dst)
            return None
        result = _Result(rows, [len(rows)] * channel.num_ranks, out)
        chunks = RowChunks(channel.num_ranks, {dst: result.put(dst, plain(rows))}, result.places)
        run_plan("gather", channel, lambda _: chunks, root=dst)
        return result.of([chunks[rank] for rank in range(channel.num_ranks)])

    def native(collectives: NativeCollectives, call: Call) -> Tensor | None:
        return collectives.gather(call, plain(rows), dst, place_of(out, rows))

    return Operation(_note(f"gather(dst={dst})", rows.shape, rows.dtype), act, native, rows.nbytes)


def scatter(tensor: Tensor | None, src: int, out: Tensor | None = None) -> Operation[Tensor]:
    """Returns the operation that gives this rank its part of the tensor of rank `src`, in `out` if it fits."""

    def act(channel: Channel) -> Tensor:
        given: dict[int, Tensor] = {}
        if channel.rank == src:
            assert tensor is not None
            given = dict(enumerate(plain(tensor).tensor_split(channel.num_ranks)))
        chunks = RowChunks(channel.num_ranks, given)
        run_plan("scatter", channel, lambda _: chunks, root=src)
        part = chunks[channel.rank]
        # A view would keep the whole memory of the source's tensor, or of a message with other ranks' parts.
        is_alone = channel.rank != src and part.untyped_storage().nbytes() == part.nbytes
        return part if is_alone else part.clone()

    def native(collectives: NativeCollectives, call: Call) -> Tensor:
        return collectives.scatter(call, None if tensor is None else plain(tensor), src, place)

    def place(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if tensor is not None:
            return place_of(out, tensor)(shape)
        kind = tuple(shape), dtype, device
        if out is not None and (out.shape, out.dtype, out.device) == kind and is_plain(out):
            return plain(out)
        return new_tensor(tuple(shape), dtype, device)

    return Operation(f"scatter(src={src})", act, native, 0 if tensor is None else tensor.nbytes)


def all_to_all(
    tensor: Tensor,
    in_splits: Sequence[int] | None,
    out_splits: Sequence[int] | None,
    out: Tensor | None = None,
) -> Operation[Tensor]:
    """Returns the operation that sends part r of `tensor` to every rank r and concatenates the received parts.

    The result is in `out` if it fits.
    """
    rows = _rows(tensor)

    def act(channel: Channel) -> Tensor:
        ranks = range(channel.num_ranks)
        sends = even_sizes(len(rows), channel.num_ranks) if in_splits is None else list(in_splits)
        expected = [sends[channel.rank] for _ in ranks] if out_splits is None else list(out_splits)
        result = _Result(rows, expected, out)
        # Chunks 0 to p - 1 are sent, chunks p to 2p - 1 received; see `pairwise_all_to_all`.
        places = {channel.num_ranks + src: place for src, place in result.places.items()}
        chunks = RowChunks(2 * channel.num_ranks, dict(enumerate(torch.split(plain(rows), sends))), places)
        run_plan("all_to_all", channel, lambda _: chunks)
        came = [chunks[channel.num_ranks + src] for src in ranks]
        check([len(chunk) for chunk in came])
        return result.of(came)

    def native(collectives: NativeCollectives, call: Call) -> Tensor:
        came = collectives.all_to_all(call, plain(rows), in_splits, place_of(out, rows))
        check(came.counts)
        return came.tensor

    def check(counts: Sequence[int]) -> None:
        if out_splits is not None and list(counts) != list(out_splits):
            raise CollectiveMismatch(
                f"out_splits={list(out_splits)}, but the ranks sent {list(counts)} rows: make them agree"
            )

    return Operation(_note("all_to_all", rows.shape, rows.dtype), act, native, rows.nbytes)


class _Result:
    """Buffer for the rows of all ranks."""

    def __init__(self, rows: Tensor, sizes: Sequence[int], out: Tensor | None) -> None:
        """Allocates room for `sizes` rows of each rank, of the shape and dtype of `rows`: in `out` if it fits."""
        shape = (sum(sizes), *rows.shape[1:])
        self._out = out
        self._buffer: Tensor | None = None
        self.places: Mapping[int, Tensor] = {}
        """Views of the buffer for the rows of each rank, if they are as many as expected."""
        if out is None:
            self._buffer = new_tensor(shape, rows.dtype)
        elif can_hold(out, shape, rows):
            self._buffer = out
        if self._buffer is not None:
            self.places = dict(enumerate(torch.split(outside_autograd(self._buffer), list(sizes))))

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
        if out is not None and out is not self._buffer and all(can_hold(out, shape, part) for part in parts):
            torch.cat(list(parts), out=outside_autograd(out))
            return out
        return torch.cat(list(parts))


def _rows(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() else tensor.reshape(1)


@lru_cache(1024)
def _note(name: str, shape: torch.Size, dtype: torch.dtype) -> str:
    """Returns the text that ranks compare: the operation, and the row shape and dtype, which all ranks must share."""
    return f"{name} of rows of {describe(shape[1:], dtype)}"
