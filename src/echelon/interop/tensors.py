"""What torch's users give as tensors of any shape, as the flat ones that Echelon's collectives compare.

torch.distributed looks at the number of elements and the dtype only: ranks may call a collective with tensors of
different shapes, and of different strides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.backends.memory import plain
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


def put(values: Tensor, into: Tensor) -> Tensor:
    """Writes flat values into a tensor of any shape, unless they are there already, and returns it."""
    if values.data_ptr() != into.data_ptr():
        into.data.copy_(values.view(into.shape))  # as in `flat`
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
