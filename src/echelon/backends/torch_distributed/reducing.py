"""The collectives that combine what the ranks have.

8- and 16-bit floats are combined as float32. What the engines cannot combine, or not as we promise, they only carry:
each rank gets its part of all tensors, and combines it in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from echelon.backends.native import Place
from echelon.backends.operators import Operator, accumulation_dtype
from echelon.backends.torch_distributed.engine import Engine
from echelon.backends.torch_distributed.engines import native_op


def all_reduce(engine: Engine, tensor: torch.Tensor, operator: Operator) -> None:
    """Combines `tensor` over all ranks, in place."""
    wide = _wide(tensor)
    flat = wide.view(-1)
    op = native_op(operator, flat.dtype)
    if op is not None:
        engine.all_reduce(flat, op)
        operator.finish(flat, engine.num_ranks)
    else:
        parts = flat.tensor_split(engine.num_ranks)
        own = _combined_part(engine, parts, operator)
        engine.exchange([own] * engine.num_ranks, parts)
    _keep(tensor, wide)


def reduce(engine: Engine, tensor: torch.Tensor, dst: int, operator: Operator) -> None:
    """Combines `tensor` over all ranks, in place on rank `dst`."""
    is_dst = engine.rank == dst
    wide = _wide(tensor)
    if not is_dst and wide.data_ptr() == tensor.data_ptr():
        wide = wide.clone()  # an engine may write there
    flat = wide.view(-1)
    op = native_op(operator, flat.dtype)
    if op is not None:
        engine.reduce(flat, dst, op)
        if is_dst:
            operator.finish(flat, engine.num_ranks)
    else:
        parts = flat.tensor_split(engine.num_ranks)
        own = _combined_part(engine, parts, operator)
        nothing = own[:0]
        sends = [own if rank == dst else nothing for rank in range(engine.num_ranks)]
        engine.exchange(sends, parts if is_dst else [nothing] * engine.num_ranks)
    if is_dst:
        _keep(tensor, wide)


def reduce_scatter(engine: Engine, tensor: torch.Tensor, operator: Operator, place: Place) -> torch.Tensor:
    """Combines `tensor` over all ranks and returns this rank's part of dim 0."""
    wide = _wide(tensor)
    parts = wide.tensor_split(engine.num_ranks)
    result = place(parts[engine.rank].shape)
    op = native_op(operator, wide.dtype)
    if op is not None and len(tensor) % engine.num_ranks == 0:
        own = result if result.dtype == wide.dtype else torch.empty_like(parts[engine.rank])
        engine.reduce_scatter(own.view(-1), wide.view(-1), op)
        operator.finish(own, engine.num_ranks)
    else:
        own = _combined_part(engine, parts, operator)
    _keep(result, own)
    return result


def _combined_part(engine: Engine, parts: Sequence[torch.Tensor], operator: Operator) -> torch.Tensor:
    """Returns this rank's part, combined over all ranks; `parts` are those of its own tensor."""
    mine = parts[engine.rank]
    came = list(mine.new_empty((engine.num_ranks, *mine.shape)))
    engine.exchange([part.contiguous() for part in parts], came)
    for other in came[1:]:
        operator.combine(came[0], other)
    return operator.finish(came[0], engine.num_ranks)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what is combined: contiguous, in the dtype to add up in; the tensor itself where it is so already."""
    return tensor.to(accumulation_dtype(tensor.dtype)).contiguous()


def _keep(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Writes a result into the caller's tensor, unless it is there already."""
    if result.data_ptr() != tensor.data_ptr() or result.dtype != tensor.dtype:
        tensor.copy_(result.view(tensor.shape))
