"""Pickles of the values that go between a parent and its ranks."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

_LOADED_BY_TORCH = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex32,
        torch.complex64,
        torch.complex128,
    }
)
"""Dtypes whose tensors torch (2.13) loads from a pickle. It fails for others, such as float8 and uint16."""


def dumps(value: object) -> bytes:
    """Returns the pickle of a value, which `pickle.loads` loads. Tensors of every dtype are taken.

    Raises:
        Exception: that of `pickle.dumps` for a value that cannot be pickled.
    """
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickler that writes tensors of some dtypes as bytes, because torch does not load them."""

    def reducer_override(self, value: object) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_quantized:
            return NotImplemented
        if value.dtype in _LOADED_BY_TORCH or value.device.type == "meta":
            return NotImplemented
        raw = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        return _tensor, (raw, value.dtype, tuple(value.shape), value.requires_grad)


def _tensor(raw: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    return raw.view(dtype).reshape(shape).requires_grad_(requires_grad)
