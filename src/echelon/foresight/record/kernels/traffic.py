"""Bytes that the kernel of an operator reads and writes, by storage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.backends.memory import tensors_in
from echelon.foresight.record.here import Traffic
from echelon.foresight.record.kernels.operators import FFTS, Operation, launches_of
from echelon.foresight.trace import UNKNOWN_STORAGE

_BY_OUTPUT = frozenset(
    [
        "embedding",
        "index_select",
        "gather",
        "index",
        "nll_loss_forward",
        "nll_loss_backward",
        "embedding_dense_backward",
        "take",
        "masked_select",
        "slice_backward",
        "select_backward",
    ]
)
"""Operators that read about as many bytes as they write, though an input is larger."""
_EMBEDDING_BAGS = frozenset({"_embedding_bag", "_embedding_bag_forward_only"})
"""Operators that read the rows of a table that their indices name."""
_ADDS = frozenset({"index_add_", "index_reduce_", "scatter_add_", "scatter_reduce_", "embedding_renorm_"})
"""Operators that change a part of their first argument and have read it. Others read it if they accumulate."""
_ACCUMULATES = {"index_put_": 3, "_index_put_impl_": 3, "put_": 3}
"""Position of the argument `accumulate`."""
_OVERWRITES = frozenset(
    [
        "copy_",
        "zero_",
        "fill_",
        "_foreach_zero_",
        "_foreach_copy_",
        "normal_",
        "uniform_",
        "random_",
        "bernoulli_",
        "exponential_",
        "zero",
        "fill",
    ]
)
"""Operators that write their first argument without having read it."""


class Accesses(NamedTuple):
    """Bytes that a kernel reads and writes."""

    reads: Traffic
    writes: Traffic


def accesses_of(
    operation: Operation,
    inputs: Sequence[tuple[int, Tensor]],
    changed: Sequence[tuple[int, Tensor]],
    outputs: Iterable[tuple[int, Tensor]],
    number: Callable[[Tensor], int],
) -> Accesses:
    """Returns the accesses of an operator's kernel.

    Args:
        operation: the operator.
        inputs: its tensors, each after its storage.
        changed: the tensors that it changes.
        outputs: its results.
        number: returns the storage of a tensor.
    """
    name, args = operation.facts.name, operation.args
    storages = {key for key, _ in changed}
    writes = _by_storage([*changed, *(each for each in outputs if each[0] not in storages)])
    touched = _touched_part(operation)
    if touched is not None:
        writes[changed[0][0]] = min(touched.num_bytes, writes[changed[0][0]])
    if name in _BY_OUTPUT:
        return Accesses(((UNKNOWN_STORAGE, sum(writes.values())),), tuple(writes.items()))
    is_overwritten = name in _OVERWRITES or touched is not None
    results = (*(args[:1] if is_overwritten else ()), operation.kwargs.get("out"))
    overwritten = {number(each) for each in tensors_in(results)}
    reads = _by_storage(each for each in inputs if each[0] not in overwritten)
    if touched is not None and touched.is_read:
        reads[changed[0][0]] = writes[changed[0][0]]
    if name in _EMBEDDING_BAGS and (rows := _rows_of_bags(args)) < reads[inputs[0][0]]:
        reads[inputs[0][0]] = rows
    # Each dimension is transformed by a pass of its own.
    passes = launches_of(operation.facts, args) if name in FFTS else 1
    return Accesses(_times(passes, reads), _times(passes, writes))


class _TouchedPart(NamedTuple):
    """Part of a tensor that an operator changes in place, such as the rows that its indices name."""

    num_bytes: int
    is_read: bool
    """Whether the operator adds to it."""


def _touched_part(operation: Operation) -> _TouchedPart | None:
    """Returns the part of its first argument that an operator changes. None if it may be all of it."""
    name, args, kwargs = operation.facts.name, operation.args, operation.kwargs
    count = _TOUCHES.get(name)
    if count is None:
        return None
    position = _ACCUMULATES.get(name, len(args))
    accumulates = bool(args[position]) if position < len(args) else bool(kwargs.get("accumulate", False))
    return _TouchedPart(count(args) * args[0].element_size(), name in _ADDS or accumulates)


def _in_dimension(args: Sequence[Any]) -> int:
    """Returns the elements of the slices that indices name in one dimension."""
    target, dim, index = args[:3]
    return int(target.numel() // max(1, target.shape[dim] if target.ndim else 1) * index.numel())


def _at_positions(args: Sequence[Any]) -> int:
    """Returns the elements that a list of indices names, with None for a dimension that has no index."""
    target, indices = args[:2]
    found = [each for each in indices if each is not None]
    whole = [size for size, each in zip(target.shape, [*indices, *[None] * target.ndim], strict=False) if each is None]
    positions = torch.broadcast_shapes(*(each.shape for each in found))  # type: ignore[no-untyped-call]
    return math.prod([*positions, *whole])


_TOUCHES: Mapping[str, Callable[[Sequence[Any]], int]] = {
    **dict.fromkeys(("index_add_", "index_copy_", "index_fill_", "index_reduce_"), _in_dimension),
    **dict.fromkeys(("index_put_", "_index_put_impl_"), _at_positions),
    **dict.fromkeys(("scatter_", "scatter_add_", "scatter_reduce_"), lambda args: args[2].numel()),
    "put_": lambda args: args[1].numel(),
    "embedding_renorm_": lambda args: args[0].shape[1] * args[1].numel(),
}
"""Elements that an operator changes of its first argument."""


def _rows_of_bags(args: Sequence[Any]) -> int:
    """Returns the bytes of the rows that an operator of `_EMBEDDING_BAGS` reads."""
    table, indices = args[:2]
    return int(indices.numel() * table.shape[1] * table.element_size())


def _times(passes: int, num_bytes: Mapping[int, int]) -> Traffic:
    """Returns the bytes of several passes."""
    return tuple((storage, passes * size) for storage, size in num_bytes.items())


def _by_storage(tensors: Iterable[tuple[int, Tensor]]) -> dict[int, int]:
    """Returns the bytes of tensors by storage. Several parts of one storage add up to at most the whole."""
    found: dict[int, int] = {}
    for key, tensor in tensors:
        num_bytes = num_bytes_of(tensor)
        if key in found:
            num_bytes = min(found[key] + num_bytes, max(tensor.untyped_storage().nbytes(), num_bytes))
        found[key] = num_bytes
    return found


def num_bytes_of(tensor: Tensor) -> int:
    """Returns the bytes that a kernel moves for a tensor: at most the size of its storage, as for an expanded one."""
    size = tensor.numel() * tensor.element_size()
    return size if size <= 4096 else min(size, tensor.untyped_storage().nbytes())
