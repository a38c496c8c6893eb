"""What torch's users give as tensors of any shape, as the flat ones that Echelon's collectives compare.

torch.distributed looks at the number of elements and the dtype only: ranks may call a collective with tensors of
different shapes, and of different strides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from echelon.backends.memory import check_writable, plain
from echelon.backends.modes import overwrite
from echelon.errors import SizeMismatch


def flat(tensor: Tensor) -> Tensor:
    """Returns the values of a tensor as one dim, outside of autograd: in its own memory if it is contiguous.

    `.data` has no gradient function and a version counter of its own. A functional collective gives its tensor a
    gradient function while the operation is under way: a view of the tensor would then refuse to be written. torch 2.15
    saves the tensor for backward at that moment too: writing a view would count as a change of the saved tensor.
    """
    return plain(tensor.data).view(-1)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the values of several tensors of one dtype, one behind the other."""
    return flat(tensors[0]) if len(tensors) == 1 else torch.cat([flat(tensor) for tensor in tensors])


def only(tensors: Sequence[Tensor], operation: str) -> Tensor:
    """Returns the one tensor of a list.

    Raises:
        SizeMismatch: there is not exactly one; torch's interface has lists for several devices of one process.
    """
    if len(tensors) != 1:
        raise SizeMismatch("1 tensor", len(tensors), operation, "give one tensor for each process")
    return tensors[0]


def writable(tensors: Sequence[Tensor], operation: str) -> Sequence[Tensor]:
    """Returns tensors that are to be written, before anything is sent, and counts the change.

    Raises:
        UnsupportedOp: elements of one overlap.
    """
    for tensor in tensors:
        check_writable(tensor, operation)
    count_change(tensors)
    return tensors


def count_change(tensors: Sequence[Tensor]) -> None:
    """Tells autograd that tensors are overwritten: a backward that needs their old values fails.

    At the start of an operation, because autograd may take over the tensor while it runs (see `flat`). An inference
    tensor has no version. Outside of inference mode it is overwritten all the same, as by Gloo.
    """
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def put(values: Tensor, into: Tensor) -> Tensor:
    """Writes flat values into a tensor of any shape, unless they are there already, and returns it."""
    if values.data_ptr() != into.data_ptr():
        overwrite(into.data, values.view(into.shape))  # as in `flat`
    return into


def deal(values: Tensor, into: Sequence[Tensor], operation: str) -> list[Tensor]:
    """Writes flat values into several tensors, one after the other, and returns those.

    Raises:
        SizeMismatch: there are more or fewer values than places.
    """
    sizes = [tensor.numel() for tensor in into]
    if sum(sizes) != values.numel():
        raise SizeMismatch(f"{values.numel()} elements of output", sum(sizes), operation, "give as many as come")
    return [put(part, tensor) for part, tensor in zip(torch.split(values, sizes), into, strict=True)]
