"""Collectives that only move data: broadcast, gather, scatter, all-gather, all-to-all, and the barrier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from echelon.backends.collective import Collective, received_buffer, result_buffer
from echelon.backends.formats import memory_layout
from echelon.backends.memory import dtype_code, dtype_of
from echelon.backends.shared.collectives.exchange import Exchange, Head, Repeated, Shown
from echelon.backends.shared.collectives.rank_region import Shared
from echelon.operation_records import OperationRecord

_CPU = torch.device("cpu")


def barrier(shared: Shared, call: OperationRecord, _: None, __: torch.Tensor | None) -> None:
    """Blocks until all ranks have called it."""
    shared.board.meet(call)


def broadcast(
    src: int, shared: Shared, call: OperationRecord, tensor: torch.Tensor, _: torch.Tensor | None
) -> torch.Tensor:
    """Overwrites `tensor` in place with rank `src`'s."""
    is_source = shared.rank == src
    # All ranks know the size here, so small tensors need no header with sizes, and take the path below.
    if tensor.nbytes > memory_layout.SMALL_BYTES:
        flat = tensor.contiguous()
        # Only the source shows a block, and only the others read: the source need not wait for readers up to 1 MiB.
        exchange = Exchange.meet(shared, call, flat, (flat.nbytes,) if is_source else ())
        exchange.collect(None if is_source else flat, (src,))
        if not is_source and flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat)
        return tensor
    # Fast path: copies and meeting are one call of the native library.
    if shared.board.broadcast(call, src, tensor.nbytes, tensor):
        return tensor
    small = shared.rooms.small(call.sequence, tensor.shape, tensor.dtype)
    if is_source:
        small.write(tensor)
    shared.board.meet(call)
    if not is_source:
        small.read(src, tensor)
    return tensor


def all_gather(
    repeated: Repeated, shared: Shared, call: OperationRecord, rows: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """Returns the rows of all ranks, in rank order. Ranks may have different numbers of rows."""
    result = repeated.run(
        shared, call, _rows(rows), range(shared.num_ranks), 0, lambda heads: _gathered(heads, rows, out)
    )
    assert result is not None
    return result


def gather(
    dst: int, repeated: Repeated, shared: Shared, call: OperationRecord, rows: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor | None:
    """Returns the rows of all ranks on rank `dst`. None on the others."""
    if shared.rank == dst:
        # Block 0 of `dst` is marked unread: nobody else needs its rows, so they are not written.
        shown = _rows(rows)._replace(unread=0)
        return repeated.run(shared, call, shown, range(shared.num_ranks), 0, lambda heads: _gathered(heads, rows, out))
    # Reads nothing, but must take part: readers of its block may still be busy.
    return repeated.run(shared, call, _rows(rows), (), 0, lambda _: None)


def scatter(
    src: int,
    repeated: Repeated,
    shared: Shared,
    call: OperationRecord,
    tensor: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Returns this rank's part of rank `src`'s tensor, split along dim 0. Only `src` knows its shape and dtype."""
    rank, count = shared.rank, shared.num_ranks
    shown = Shown(None)
    if tensor is not None and rank == src:
        whole = tensor.contiguous()
        facts = (dtype_code(whole.dtype), *whole.shape)
        shown = Shown(whole, _even(len(whole), count, _row_bytes(whole)).sizes, facts, src)

    def make_part(heads: Sequence[Head]) -> torch.Tensor:
        # Shape and dtype travel as facts in the header of `src`.
        code, num_rows, *rest = heads[src].facts
        return received_buffer(out, (_even(num_rows, count, 0).counts[rank], *rest), dtype_of(code), _CPU, tensor)

    part = repeated.run(shared, call, shown, (src,), rank, make_part)
    assert part is not None
    return part


def all_to_all(
    collective: Collective,
    repeated: Repeated,
    shared: Shared,
    call: OperationRecord,
    rows: torch.Tensor,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, list[int]]:
    """Sends `in_splits[r]` rows to each rank r. Returns the rows received, in rank order, and their numbers.

    Without `in_splits`, rows are split as torch.tensor_split does.
    """
    rank, count, whole = shared.rank, shared.num_ranks, rows.contiguous()
    row_bytes, splits = _row_bytes(whole), collective.in_splits
    parts = _even(len(whole), count, row_bytes) if splits is None else _Parts.of(splits, row_bytes)
    counts: list[int] = []

    def make_result(heads: Sequence[Head]) -> torch.Tensor:
        counts[:] = [head.facts[rank] for head in heads]
        return result_buffer(out, (sum(counts), *rows.shape[1:]), rows)

    shown = Shown(whole, parts.sizes, parts.counts, rank)
    result = repeated.run(shared, call, shown, range(count), rank, make_result)
    assert result is not None
    return result, counts


def _rows(rows: torch.Tensor) -> Shown:
    whole = rows.contiguous()
    return Shown(whole, (whole.nbytes,), (len(whole),))


def _gathered(heads: Sequence[Head], rows: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Returns a tensor for the rows of all ranks: `out` if they fit there."""
    return result_buffer(out, (sum([head.facts[0] for head in heads]), *rows.shape[1:]), rows)


class _Parts(NamedTuple):
    """Numbers of rows, and bytes, for each rank."""

    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    """In bytes."""

    @classmethod
    def of(cls, counts: tuple[int, ...], row_bytes: int) -> _Parts:
        return cls(counts, tuple(count * row_bytes for count in counts))


# Cached: training loops repeat the same shapes.
@lru_cache(1024)
def _even(num_rows: int, num_ranks: int, row_bytes: int) -> _Parts:
    """Splits rows as torch.tensor_split does: the first ranks have one row more if the division leaves a rest."""
    return _Parts.of(tuple(len(range(rank, num_rows, num_ranks)) for rank in range(num_ranks)), row_bytes)


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.nbytes // max(len(rows), 1)
