"""Some values of the tensors of a batch, and a checksum of them, by which ranks compare their batches."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from echelon.backends.admission import has_values, stands_for_device
from echelon.backends.memory import bytes_of, plain
from echelon.backends.modes import in_normal_mode

_NUM_VALUES = 1024
"""Number of values of a tensor that are compared, about."""
NOTHING = 0
"""Checksum of a batch without tensors."""
UNKNOWN = -1
"""Checksum of tensors without values, as in a forecast."""
_MARK, _BITS = 1 << 52, 26
"""A checksum is below 2^53, so that float64 holds it, and above all other marks. Its upper half is of the form."""


class Excerpt(NamedTuple):
    """Some values of a tensor, copied: a model may write to its input."""

    shape: tuple[int, ...]
    values: torch.Tensor


@in_normal_mode
def excerpts(tensors: Sequence[torch.Tensor]) -> list[Excerpt] | None:
    """Returns some values of each tensor. None if one of them has none, or none that torch copies."""
    if any(stands_for_device(tensor) or not has_values(tensor) for tensor in tensors):
        return None
    try:
        return [Excerpt(tuple(tensor.shape), plain(_some(tensor.detach())).clone()) for tensor in tensors]
    except RuntimeError:  # of some dtypes, such as int4, torch copies nothing
        return None


def checksum(taken: Sequence[Excerpt] | None) -> int:
    """Returns the checksum of excerpts. Waits for their device."""
    if taken is None:
        return UNKNOWN
    if not taken:
        return NOTHING
    kinds = values_of_all = 0
    for shape, values in taken:
        kinds = zlib.crc32(f"{values.dtype}{values.dim()}".encode(), kinds)
        values_of_all = zlib.crc32(bytes_of(values.cpu()), zlib.crc32(str(shape).encode(), values_of_all))
    return _MARK | kinds % (1 << _BITS) << _BITS | values_of_all % (1 << _BITS)


def form(of_checksum: int) -> int:
    """Returns the part of a checksum that stands for the dtypes and dims of the tensors."""
    return of_checksum >> _BITS


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of about `_NUM_VALUES` values of a tensor, spread over all of its dims."""
    if tensor.numel() <= _NUM_VALUES:
        return tensor
    most = max(2, round(_NUM_VALUES ** (1 / tensor.dim())))
    return tensor[tuple(slice(None, None, -(-size // most)) for size in tensor.shape)]
