"""The collectives that move what the ranks have, without looking at it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from echelon.backends.memory import as_bytes, dtype_code, dtype_of
from echelon.backends.native import AnyPlace, Call, Gathered, Place
from echelon.backends.shared import layout
from echelon.backends.shared.exchange import Block, Exchange
from echelon.backends.shared.room import Shared
from echelon.backends.shared.short_way import meet_with, part_together
from echelon.backends.shared.streaming import pass_by, stream


def barrier(shared: Shared, call: Call) -> None:
    """Returns when all ranks have come."""
    shared.board.announce(call)
    shared.board.meet(call)


def broadcast(shared: Shared, call: Call, tensor: torch.Tensor, src: int) -> None:
    """Overwrites `tensor` with that of rank `src`, in place."""
    if tensor.nbytes > layout.SMALL_BYTES:
        flat = tensor.contiguous()
        _broadcast_pieces(shared, call, as_bytes(flat), src)
        if shared.rank != src and flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat)
        return
    small = shared.rooms.small(call.sequence, tensor.shape, tensor.dtype)
    shared.board.announce(call)
    if shared.rank == src:
        small.write(tensor)
    shared.board.meet(call)
    if shared.rank != src:
        small.read(src, tensor)


def _broadcast_pieces(shared: Shared, call: Call, data: torch.Tensor, src: int) -> None:
    """Has rank `src` write a large tensor piece by piece, unless all can read it where it is."""
    is_source = shared.rank == src
    everywhere = meet_with(shared, call, data, owner=src)
    if everywhere is not None:
        if not is_source:
            data.copy_(everywhere[src])
        part_together(shared, call)
        return
    slots = shared.rooms.slots(torch.uint8)[src]
    pieces = torch.split(data, shared.rooms.slot_bytes)

    def write(number: int, slot: int) -> None:
        slots[slot][: len(pieces[number])].copy_(pieces[number])

    def read(number: int, slot: int) -> None:
        pieces[number].copy_(slots[slot][: len(pieces[number])])

    stream(shared, call, len(pieces), write if is_source else pass_by, pass_by if is_source else read)


def all_gather(shared: Shared, call: Call, rows: torch.Tensor, place: Place) -> torch.Tensor:
    """Returns the rows of all ranks, of which each may have another number."""
    return _collect(_show_rows(shared, call, rows), rows, place)


def gather(shared: Shared, call: Call, rows: torch.Tensor, dst: int, place: Place) -> torch.Tensor | None:
    """Returns the rows of all ranks on rank `dst`, None on others."""
    exchange = _show_rows(shared, call, rows)
    if shared.rank == dst:
        return _collect(exchange, rows, place)
    exchange.read({})
    return None


def scatter(shared: Shared, call: Call, tensor: torch.Tensor | None, src: int, place: AnyPlace) -> torch.Tensor:
    """Returns this rank's part of the tensor of rank `src`; others need not know its shape and dtype."""
    if tensor is not None and shared.rank == src:
        whole = tensor.contiguous()
        parts = whole.tensor_split(shared.num_ranks)
        facts = [dtype_code(tensor.dtype), *tensor.shape]
        exchange = Exchange.meet(shared, call, as_bytes(whole), [part.nbytes for part in parts], facts)
        own = place(parts[src].shape, tensor.dtype, tensor.device).copy_(parts[src])
        exchange.read({})
        return own
    exchange = Exchange.meet(shared, call, None, [])
    code, rows, *rest = exchange.heads[src].facts
    count = len(range(shared.rank, rows, shared.num_ranks))  # as torch.tensor_split: the first have one more
    part = place((count, *rest), dtype_of(code), torch.device("cpu"))
    exchange.read({Block(src, shared.rank): as_bytes(part)})
    return part


def all_to_all(shared: Shared, call: Call, rows: torch.Tensor, splits: Sequence[int] | None, place: Place) -> Gathered:
    """Sends so many rows to each rank, and returns those that came."""
    rank, rows = shared.rank, rows.contiguous()
    parts = rows.tensor_split(shared.num_ranks) if splits is None else torch.split(rows, list(splits))
    exchange = Exchange.meet(
        shared, call, as_bytes(rows), [part.nbytes for part in parts], [len(part) for part in parts]
    )
    counts = [head.facts[rank] for head in exchange.heads]
    result = place((sum(counts), *rows.shape[1:]))
    places = torch.split(result, counts)
    places[rank].copy_(parts[rank])
    exchange.read({Block(peer, rank): as_bytes(part) for peer, part in enumerate(places) if peer != rank})
    return Gathered(result, counts)


def _show_rows(shared: Shared, call: Call, rows: torch.Tensor) -> Exchange:
    return Exchange.meet(shared, call, as_bytes(rows.contiguous()), [rows.nbytes], [len(rows)])


def _collect(exchange: Exchange, rows: torch.Tensor, place: Place) -> torch.Tensor:
    """Returns the rows of all; those of this rank are given, since a rank does not read its own blocks."""
    rank = exchange.shared.rank
    counts = [head.facts[0] for head in exchange.heads]
    result = place((sum(counts), *rows.shape[1:]))
    places = torch.split(result, counts)
    places[rank].copy_(rows)
    exchange.read({Block(peer, 0): as_bytes(part) for peer, part in enumerate(places) if peer != rank})
    return result
