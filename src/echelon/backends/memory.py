"""The bytes of a tensor, and its dtype as a code on the wire."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator

import torch

from echelon._native import copy, core
from echelon._torch_private.autograd import forward_ad_level
from echelon._torch_private.tensors import FakeTensor, dispatch_depth, real_tensors, transform_stack
from echelon.backends.admission import (
    FAR_ADDRESS,
    ORDINARY_TYPES,
    check_values,
    elements_overlap,
    has_address,
)
from echelon.backends.formats.wire import DTYPES
from echelon.backends.modes import normal_mode, outside_autograd
from echelon.errors import SizeMismatch, UnsupportedOp

_DTYPES: tuple[torch.dtype | None, ...] = tuple(getattr(torch, name, None) for name, _ in DTYPES)
_CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}


_IN_NUMPY = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool})
"""Dtypes for which numpy gives a buffer that can be cast to bytes."""


def dtype_code(dtype: torch.dtype) -> int:
    """Returns the code of a dtype on the wire.

    Raises:
        UnsupportedOp: tensors of this dtype cannot be sent.
    """
    code = _CODES.get(dtype)
    if code is None:
        raise UnsupportedOp(f"tensors of dtype {dtype} cannot be sent: convert them first")
    return code


def dtype_of(code: int) -> torch.dtype:
    """Returns the dtype of a code.

    Raises:
        UnsupportedOp: this torch does not have that dtype.
    """
    dtype = _DTYPES[code]
    if dtype is None:
        raise UnsupportedOp(f"this torch has no dtype {DTYPES[code][0]}, which a peer sent: use one version everywhere")
    return dtype


@functools.cache
def type_of(dtype: torch.dtype) -> int:
    """Returns the code of a dtype in the native library. 0 if it cannot read tensors of that dtype."""
    # Without a mode of the caller: in FakeTensorMode the tensor would have no memory.
    with real_tensors(), normal_mode():
        return int(core.type_of(torch.empty(0, dtype=dtype, device="cpu")))


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Makes an ordinary tensor on a device, also in inference mode and under another default device.

    Raises:
        UnsupportedOp: there is no memory for it.
    """
    try:
        if torch.is_inference_mode_enabled():
            with normal_mode():
                return torch.empty(shape, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch's way of saying that it is out of memory
        size = math.prod(shape) * dtype.itemsize
        raise UnsupportedOp(
            f"no memory for a message of {size} bytes, {describe(shape, dtype)}: send it in parts"
        ) from error


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor, writable, as bytes. The view keeps the tensor alive."""
    if tensor.dtype in _IN_NUMPY and tensor.numel() and not tensor.requires_grad:  # a third of the time of what follows
        return tensor.numpy().data.cast("B")
    return as_bytes(tensor.detach()).numpy().data if tensor.numel() else memoryview(bytearray())


def copy_from(address: int, tensor: torch.Tensor) -> None:
    """Overwrites a contiguous CPU tensor with the bytes that stand at a place in this process's memory."""
    if num_bytes := tensor.nbytes:
        copy(tensor.data_ptr(), address, num_bytes)


def copy_contiguous(source: torch.Tensor, target: torch.Tensor) -> None:
    """Overwrites a contiguous CPU tensor with the bytes of another one; faster than torch's `copy_`.

    Raises:
        SizeMismatch: they have not as many.
    """
    size = target.nbytes
    if source.nbytes != size:
        raise SizeMismatch(f"{size} bytes", source.nbytes, "a copy")
    if size:
        copy(target.data_ptr(), source.data_ptr(), size)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a contiguous tensor as a tensor of bytes."""
    flat = tensor.reshape(-1)
    if flat.numel() < 2:
        flat = flat.as_strided(flat.shape, (1,))  # a single element may have any stride, and no other view then
    return flat.view(torch.uint8)


@functools.lru_cache(1024)
def describe(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> str:
    """Returns shape and dtype in few characters, such as "float32[2, 3]"."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of a dense tensor holds its values contiguously, without a lazy conj or neg."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_ordinary(tensor: object) -> bool:
    """Whether a value is a tensor for the fast paths, outside of all modes that change tensors.

    It is on the CPU, dense, plain, of torch's own class, and part of no graph. A tensor of another class is not
    ordinary, because its own code may answer any question about it. Modes are fake tensors, torch.func, forward-mode AD
    and inference.
    """
    # Fast path: no call of a Python function, as every small operation asks.
    if (
        type(tensor) not in ORDINARY_TYPES
        or dispatch_depth() > 0
        or transform_stack() is not None
        or forward_ad_level() >= 0
        or torch.is_inference_mode_enabled()
    ):
        return False
    assert isinstance(tensor, torch.Tensor)
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_neg()
        and not tensor.is_conj()
        and not tensor.is_inference()
        and (tensor.data_ptr() > FAR_ADDRESS or has_address(tensor))
    )


def tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yields the tensors of arguments and of nested lists among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values of a dense tensor, outside of autograd, in its own memory if it is plain, else copied."""
    tensor = outside_autograd(tensor)
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def check_dense(tensor: torch.Tensor, devices: frozenset[str], what: str) -> bool:
    """Says whether `tensor` is on one of `devices`.

    Raises:
        UnsupportedOp: it is no dense tensor with memory of its own, or of a dtype that cannot be sent.
    """
    check_values(tensor, what, takes_meta=True)
    if tensor.is_cpu and tensor.dtype in _CODES and "cpu" in devices:
        return True  # as nearly always; to ask for the name of a device alone takes as long as this
    dtype_code(tensor.dtype)
    return tensor.device.type in devices


def wrong_device(tensor: torch.Tensor, devices: frozenset[str], what: str) -> UnsupportedOp:
    """Makes the error for a tensor that is not on one of `devices`."""
    advice = "give it memory there first, such as by .to_empty()" if tensor.is_meta else "copy it there first"
    return UnsupportedOp(
        f"{what}: a tensor on {tensor.device}, but this backend can only move tensors on {', '.join(sorted(devices))}: "
        f"{advice}"
    )


def check_tensor(tensor: torch.Tensor, devices: frozenset[str], what: str) -> None:
    """Raises UnsupportedOp unless `tensor` is a plain tensor on one of `devices`, of a dtype that can be sent."""
    if not check_dense(tensor, devices, what):
        raise wrong_device(tensor, devices, what)
    if not is_plain(tensor):
        raise UnsupportedOp(f"{what} takes a contiguous dense tensor: call .contiguous() (or .resolve_conj()) first")


def check_writable(tensor: torch.Tensor, what: str) -> None:
    """Raises UnsupportedOp if elements of a dense tensor overlap, as in an expanded tensor."""
    if elements_overlap(tensor):
        raise UnsupportedOp(f"{what} writes the tensor in place, but its elements share memory: call .clone() first")


def without_class(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of torch's own class, as another rank receives it."""
    return (
        tensor if type(tensor) is torch.Tensor or isinstance(tensor, FakeTensor) else tensor.as_subclass(torch.Tensor)
    )
