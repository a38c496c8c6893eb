"""Collectives of Echelon's groups on fake tensors, recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.backends.collective import Collective as Call
from echelon.backends.collective import received_buffer, result_buffer
from echelon.collectives.calls.chunks import even_sizes
from echelon.foresight.record.here import Recording
from echelon.foresight.trace import Group
from echelon.simulation.values import splits_of

_NAMES = {"broadcast_rows": "broadcast"}


def recorded_collective(
    recording: Recording, group: Group, calls: Sequence[Call], rank: int, tensor: Tensor | None, out: Tensor | None
) -> Tensor | None:
    """Records a collective of fake tensors. Returns its result.

    Args:
        recording: of the calling rank.
        group: the ranks.
        calls: calls of all ranks, in the order of the group.
        rank: the calling rank within the group.
        tensor: its tensor.
        out: as in `echelon.backends.collective.Run`.
    """
    call = calls[rank]
    result = _result(calls, rank, tensor, out)
    inputs = [] if tensor is None else [tensor]
    outputs = [] if result is None else [result]
    dtype = next(each.dtype for each in (*inputs, *outputs))
    recording.collective(
        _NAMES.get(call.kind, call.kind),
        group,
        inputs,
        outputs,
        num_bytes=result.nbytes if call.kind == "all_gather" and result is not None else _num_bytes(calls, call, dtype),
        op=call.op,
        root=group.ranks[call.root] if call.root >= 0 else -1,
        blocking=True,
    )
    return result


def _num_bytes(calls: Sequence[Call], call: Call, dtype: torch.dtype) -> int:
    """Returns the bytes of the whole array."""
    if call.kind == "gather":
        return sum(_elements(each) for each in calls) * dtype.itemsize
    return _elements(calls[call.root] if call.kind in ("scatter", "broadcast_rows") else call) * dtype.itemsize


def _elements(call: Call) -> int:
    return 0 if call.shape is None else call.shape.numel()


def _result(calls: Sequence[Call], rank: int, tensor: Tensor | None, out: Tensor | None) -> Tensor | None:
    call, num_ranks = calls[rank], len(calls)
    kind = call.kind
    if kind in ("all_reduce", "reduce", "broadcast"):
        return tensor
    if kind in ("scatter", "broadcast_rows"):
        told = calls[call.root]
        assert told.shape is not None
        assert told.dtype is not None
        shape = told.shape
        if kind == "scatter":
            shape = torch.Size((even_sizes(shape[0], num_ranks)[rank], *shape[1:]))
        return received_buffer(out, shape, told.dtype, torch.device("cpu"), tensor)
    if kind == "gather" and rank != call.root:
        return None
    assert tensor is not None
    if kind == "reduce_scatter":
        num_rows = even_sizes(tensor.shape[0], num_ranks)[rank]
    elif kind == "all_to_all":
        num_rows = sum(call.out_splits or (splits_of(each, num_ranks)[rank] for each in calls))
    elif kind == "all_gather" and out is not None and out.dim():
        # Ranks that are not recorded may have other numbers of rows, which only the caller knows.
        num_rows = len(out)
    else:
        num_rows = sum(math.prod(each.shape[:1]) for each in calls if each.shape is not None)
    return result_buffer(out, (num_rows, *tensor.shape[1:]), tensor)
