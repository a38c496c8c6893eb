"""The state of a sharded optimizer: gathered whole for a checkpoint, and cut again.

Of a parameter's state, tensors with one value per element of the piece are sharded as the parameter is; all else, such
as the number of steps, is the same on all ranks that have a piece of the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from echelon.data_parallel.shards import Piece
from echelon.group import JsonLike, ProcessGroup


class _Entry(NamedTuple):
    """One value in the state of a parameter, as the ranks tell each other of it."""

    name: str
    dtype: str
    """Of a tensor; empty for a value that is none."""
    is_sharded: bool
    value: JsonLike


def gather_state(
    states: Iterable[tuple[Piece, Mapping[str, Any]]],
    parameters: Sequence[Tensor],
    group: ProcessGroup,
    dst: int | None = None,
) -> dict[int, dict[str, Any]]:
    """Puts the states of the pieces on all ranks together. Every rank must call it.

    Args:
        states: this rank's pieces and the state of each.
        parameters: all parameters, whole; their values do not matter.
        group: the ranks that have the pieces.
        dst: the only rank that gets the result, others get nothing; None: all do.

    Returns:
        The state of each parameter that has one, by its number; tensors are new.
    """
    mine = {piece.parameter: dict(state) for piece, state in states if state}
    told = group.all_gather_object({str(number): _describe(state) for number, state in mine.items()})
    owners = [cast("dict[str, list[Any]]", each) for each in told]
    gathered: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(parameters):
        having = [rank for rank, owned in enumerate(owners) if str(number) in owned]
        if not having:
            continue
        own = mine.get(number, {})
        entries = [_Entry(*entry) for entry in owners[having[0]][str(number)]]
        whole = {entry.name: _collect(entry, own, having[0], parameter, group, dst) for entry in entries}
        if dst is None or dst == group.rank:
            gathered[number] = whole
    return gathered


def cut_state(whole: Mapping[str, Any], piece: Piece, parameter: Tensor) -> dict[str, Any]:
    """Returns the state of one piece, in new tensors, from that of its whole parameter.

    Raises:
        ValueError: the state belongs to a parameter of another shape.
    """
    state: dict[str, Any] = {}
    for name, value in whole.items():
        if not isinstance(value, Tensor):
            state[name] = value
        elif name == "step" or value.dim() == 0 < parameter.dim():
            state[name] = value.detach().clone()
        elif value.shape == parameter.shape:
            dtype = parameter.dtype if parameter.is_floating_point() else value.dtype
            moved = torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(value.detach())
            state[name] = in_memory_order(moved)[piece.start : piece.stop].clone()
        else:
            raise ValueError(
                f"state {name!r} of parameter {piece.parameter} has shape {tuple(value.shape)}, the parameter "
                f"{tuple(parameter.shape)}: load the state of the same model"
            )
    return state


def in_memory_order(tensor: Tensor) -> Tensor:
    """Returns a one-dimensional view of a tensor without gaps, in the order of its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _describe(state: Mapping[str, Any]) -> list[JsonLike]:
    entries: list[JsonLike] = []
    for name, value in state.items():
        if isinstance(value, Tensor):
            entries.append([name, str(value.dtype).removeprefix("torch."), value.dim() > 0, None])
        else:
            entries.append([name, "", False, value])
    return entries


def _collect(
    entry: _Entry, own: Mapping[str, Any], first: int, parameter: Tensor, group: ProcessGroup, dst: int | None
) -> Any:
    """Brings one value together; `first` is the lowest rank that has it."""
    if not entry.dtype:
        return entry.value
    dtype = cast("torch.dtype", getattr(torch, entry.dtype))
    gives = entry.name in own and (entry.is_sharded or group.rank == first)
    part = own[entry.name].reshape(-1) if gives else torch.empty(0, dtype=dtype, device=parameter.device)
    came = group.all_gather(part) if dst is None else group.gather(part, dst)
    if came is None:
        return None
    if not entry.is_sharded:
        return came[0]
    whole = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    in_memory_order(whole).copy_(came)
    return whole
