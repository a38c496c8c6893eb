"""The collectives on tensors of any number of rows: they are moved, and concatenated along dim 0.

How many rows other ranks have is learned when they come. Places are made for as many as this rank has, and what fits is
received where it belongs; only if ranks differ is anything copied.
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
    """Returns the tensors of all ranks, concatenated along dim 0; `out`, if it fits."""
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
    """Returns the tensors of all ranks, concatenated along dim 0, on rank `dst`; None on others. `out`, if it fits."""
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
    """Returns this rank's part of the tensor of rank `src`; `out`, if it fits."""

    def act(channel: Channel) -> Tensor:
        given: dict[int, Tensor] = {}
        if channel.rank == src:
            assert tensor is not None
            given = dict(enumerate(plain(tensor).tensor_split(channel.num_ranks)))
        chunks = RowChunks(channel.num_ranks, given)
        run_plan("scatter", channel, lambda _: chunks, root=src)
        part = chunks[channel.rank]
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
    """Sends part r of `tensor` to every rank r and returns the parts that came, concatenated; `out`, if it fits."""
    rows = _rows(tensor)

    def act(channel: Channel) -> Tensor:
        ranks = range(channel.num_ranks)
        sends = even_sizes(len(rows), channel.num_ranks) if in_splits is None else list(in_splits)
        expected = [sends[channel.rank] for _ in ranks] if out_splits is None else list(out_splits)
        result = _Result(rows, expected, out)
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
    """Where the rows of all ranks are put together."""

    def __init__(self, rows: Tensor, sizes: Sequence[int], out: Tensor | None) -> None:
        """Makes room for rows of the kind of `rows`, `sizes` from each rank: in `out` if it has that shape."""
        shape = (sum(sizes), *rows.shape[1:])
        self._out = out
        self._buffer: Tensor | None = None
        self.places: Mapping[int, Tensor] = {}
        """Where the rows of each rank belong, if there are as many as expected."""
        if out is None:
            self._buffer = new_tensor(shape, rows.dtype)
        elif can_hold(out, shape, rows):
            self._buffer = out
        if self._buffer is not None:
            self.places = dict(enumerate(torch.split(outside_autograd(self._buffer), list(sizes))))

    def put(self, rank: int, part: Tensor) -> Tensor:
        """Copies a rank's rows to where they belong, and returns them there."""
        place = self.places.get(rank)
        return part if place is None else place.copy_(part)

    def of(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the rows of all ranks as one tensor."""
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
    """Returns what ranks compare: the operation, and what tensors must have in common to be concatenated."""
    return f"{name} of rows of {describe(shape[1:], dtype)}"
