"""Conversion between torch's tensors of any shape and the flat tensors that Echelon's collectives compare.

torch.distributed compares only number of elements and dtype: ranks may call a collective with tensors of different
shapes and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from echelon.backends.memory import check_writable, plain
from echelon.backends.modes import overwrite
from echelon.errors import SizeMismatch

Tensors: TypeAlias = Sequence[Tensor]


def flat(tensor: Tensor) -> Tensor:
    """Returns a flat tensor without autograd history: a view if the tensor is contiguous, else a copy."""
    # `.data` has no gradient function and a version counter of its own. A functional collective gives its tensor a
    # gradient function while the operation is in flight: a view of the tensor would then refuse to be written. torch
    # 2.15 saves the tensor for backward at that moment too: writing a view would count as a change of the saved tensor.
    return plain(tensor.data).view(-1)


def row(tensor: Tensor, outputs: Tensors, num_ranks: int) -> Tensor:
    """Returns a tensor as one row of a gather if the outputs have room for as much from each rank. Else a flat tensor.

    Ranks compare the sizes of rows, but not their numbers: a flat tensor is allowed to differ in size.
    """
    values = flat(tensor)
    sizes = [output.numel() for output in outputs]
    is_even = sizes in ([values.numel()] * num_ranks, [num_ranks * values.numel()])
    return values.view(1, -1) if is_even and sizes[0] else values


def joined(tensors: Tensors) -> Tensor:
    """Returns several tensors of one dtype, flattened and concatenated."""
    return flat(tensors[0]) if len(tensors) == 1 else torch.cat([flat(tensor) for tensor in tensors])


def only(tensors: Tensors, operation: str) -> Tensor:
    """Returns the only tensor of a list. torch's interface has lists for several devices of one process.

    Raises:
        SizeMismatch: the list has not exactly one tensor.
    """
    if len(tensors) != 1:
        raise SizeMismatch("1 tensor", len(tensors), operation, "give one tensor for each process")
    return tensors[0]


def check_length(tensors: Tensors, num_ranks: int, operation: str) -> None:
    """Raises SizeMismatch if a list has not as many tensors as there are ranks."""
    if len(tensors) != num_ranks:
        raise SizeMismatch(f"a list of {num_ranks} tensors", len(tensors), operation, "give one for each rank")


def check_list(tensors: Tensors, rank: int, num_ranks: int, size: int, operation: str) -> None:
    """Checks a list with a tensor for each rank, of which this rank knows the size of its own.

    Raises:
        SizeMismatch: the list has not as many tensors as there are ranks, or this rank's has another size. The elements
            would be moved on to the next tensor of the list.
    """
    check_length(tensors, num_ranks, operation)
    if tensors[rank].numel() != size:
        expected = f"{size} elements in the tensor of rank {rank}"
        raise SizeMismatch(expected, tensors[rank].numel(), operation, "give each rank's tensor the size of its part")


def check_sizes(tensors: Tensors, sizes: Sequence[int], operation: str) -> None:
    """Checks a list with a tensor for each rank, once the sizes of all parts are known.

    Raises:
        SizeMismatch: a tensor has another size than the part of its rank.
    """
    own = [tensor.numel() for tensor in tensors]
    if own != list(sizes):
        expected = f"tensors of {list(sizes)} elements, as the ranks sent"
        raise SizeMismatch(expected, own, operation, "give each rank's tensor the size of its part")


def writable(tensors: Tensors, operation: str) -> Tensors:
    """Checks output tensors before anything is sent, counts their change for autograd, and returns them.

    Raises:
        UnsupportedOp: a tensor has overlapping elements.
    """
    for tensor in tensors:
        check_writable(tensor, operation)
    count_change(tensors)
    return tensors


def count_change(tensors: Tensors) -> None:
    """Increments autograd's version of tensors that are overwritten: a backward that needs the old values fails.

    Called at the start of an operation, because autograd may save the tensor while it runs (see `flat`).
    """
    # An inference tensor has no version. It is overwritten outside of inference mode too, as by Gloo.
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def deal(values: Tensor | None, into: Tensors, operation: str) -> list[Tensor]:
    """Writes contiguous values into tensors of any shapes, in order. Returns the tensors.

    None for the values, on a rank that gets none: returns an empty list.

    Raises:
        SizeMismatch: the number of values is not the number of elements of all tensors, or their dtype differs.
    """
    if values is None:
        return []
    sizes = [tensor.numel() for tensor in into]
    if sum(sizes) != values.numel():
        raise SizeMismatch(f"{values.numel()} elements of output", sum(sizes), operation, "give as many as come")
    for tensor in into:
        if tensor.dtype != values.dtype:
            raise SizeMismatch(f"an output of {values.dtype}", tensor.dtype, operation, "give the dtype that comes")
    for part, tensor in zip([values] if len(into) == 1 else torch.split(values.view(-1), sizes), into, strict=True):
        # Equal pointers: the collective has written in place.
        if part.data_ptr() != tensor.data_ptr():
            overwrite(tensor.data, part.view(tensor.shape))  # `.data` as in `flat`
    return list(into)


def deal_all(values: Tensors, into: Sequence[Tensors], operation: str) -> list[Tensor]:
    """Writes each of many contiguous tensors into a list of tensors. Returns all tensors."""
    return [tensor for part, places in zip(values, into, strict=True) for tensor in deal(part, places, operation)]
