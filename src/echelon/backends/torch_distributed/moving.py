"""The collectives that move what the ranks have, as bytes, so that the dtype does not matter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from echelon.backends.memory import as_bytes, dtype_code, dtype_of
from echelon.backends.native import AnyPlace, Gathered, Place
from echelon.backends.torch_distributed.engine import Engine

Facts = Sequence[Sequence[int]]
"""What each rank has told the others."""


def broadcast(engine: Engine, tensor: torch.Tensor, src: int) -> None:
    """Overwrites `tensor` with that of rank `src`, in place."""
    flat = tensor.contiguous()
    if flat.numel():
        engine.broadcast(as_bytes(flat), src)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat)


def all_gather(engine: Engine, told: Facts, rows: torch.Tensor, place: Place) -> torch.Tensor:
    """Returns the rows of all ranks; each has told how many it has."""
    counts = [facts[0] for facts in told]
    result = place((sum(counts), *rows.shape[1:]))
    if not result.numel():
        return result
    if len(set(counts)) == 1:
        engine.all_gather(as_bytes(result), as_bytes(rows.contiguous()))
        return result
    places = torch.split(result, counts)
    places[engine.rank].copy_(rows)
    for src, part in enumerate(places):
        if part.numel():
            engine.broadcast(as_bytes(part), src)
    return result


def gather(engine: Engine, told: Facts, rows: torch.Tensor, dst: int, place: Place) -> torch.Tensor | None:
    """Returns the rows of all ranks on rank `dst`; each has told how many it has."""
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
    """Returns what the rank that scatters tells the others: whether the tensor is on the device, dtype, shape."""
    if tensor is None:
        return []
    return [int(tensor.device.type == device.type), dtype_code(tensor.dtype), *tensor.shape]


def scatter(
    engine: Engine, told: Facts, tensor: torch.Tensor | None, src: int, device: torch.device, place: AnyPlace
) -> torch.Tensor:
    """Returns this rank's part of the tensor of rank `src`, which has told the others what it looks like."""
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
    engine: Engine, told: Facts, parts: Sequence[torch.Tensor], rows: torch.Tensor, place: Place
) -> Gathered:
    """Sends each rank its part of this rank's rows, and returns those that came; each has told its parts' sizes."""
    counts = [facts[engine.rank] for facts in told]
    result = place((sum(counts), *rows.shape[1:]))
    engine.exchange([part.contiguous() for part in parts], torch.split(result, counts))
    return Gathered(result, counts)
