"""Admission of tensors: one function decides whether the library can read a tensor's values where they are.

Bytes are moved by address. A DTensor, a FakeTensor or a wrapper of torch.func has none, although it says that it is a
dense tensor of some shape on the CPU. To copy from address 0 ends the process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from echelon._torch_private.autograd import forward_ad_level, is_dual
from echelon._torch_private.tensors import FakeTensor, is_faking, transform_stack, wraps_new_tensors
from echelon.errors import UnsupportedOp

ORDINARY_TYPES = (torch.Tensor, torch.nn.Parameter)
"""Classes without code of their own."""

_NO_DISPATCH = torch.Tensor.__torch_dispatch__
"""The default `__torch_dispatch__`, for classes that do not define one."""
FAR_ADDRESS = 1 << 40
"""An address above this is never the offset of a view in an empty storage, which is the address that torch tells."""
_UNINITIALIZED = (torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)

_ADVICE = {
    "DTensor": "pass tensor.to_local(), this rank's part",
    "FakeTensor": "pass a tensor that was made outside of FakeTensorMode",
    "NestedTensor": "unbind it, and pass its parts",
    "AsyncCollectiveTensor": "pass tensor.wait()",
}
"""Advice for classes of torch, by name: to import them takes a second."""


class _Here(threading.local):
    """Setting of the calling thread."""

    takes_fake_tensors = False


_here = _Here()


@contextmanager
def taking_fake_tensors() -> Iterator[None]:
    """Inside, the calling thread's backend takes fake tensors, as tensors of a device."""
    _here.takes_fake_tensors = True
    try:
        yield
    finally:
        _here.takes_fake_tensors = False


def stands_for_device(tensor: object) -> bool:
    """Whether a fake tensor stands for one of a device, see `taking_fake_tensors`."""
    return _here.takes_fake_tensors and isinstance(tensor, FakeTensor)


def check_mode(what: str) -> None:
    """Raises UnsupportedOp inside of FakeTensorMode or a transform of torch.func.

    There even the tensors that the library makes for itself can be without memory.

    Args:
        what: the group or operation, for the error.
    """
    if not wraps_new_tensors() or (_here.takes_fake_tensors and transform_stack() is None):
        return
    if is_faking():
        raise UnsupportedOp(f"{what} was called inside of FakeTensorMode, where tensors have no values: call outside")
    raise UnsupportedOp(
        f"{what} was called inside of a transform of torch.func (vmap, grad, jvp, functionalize), where new tensors "
        "can be wrappers without memory: call it outside of the transform"
    )


def check_values(tensor: object, what: str, *, takes_sparse: bool = False, takes_meta: bool = False) -> None:
    """Raises UnsupportedOp unless a tensor's values stand in memory of its own.

    Args:
        tensor: on any device.
        what: the operation, or the place of the tensor in it, for the error.
        takes_sparse: whether a sparse COO tensor is allowed.
        takes_meta: whether one on the meta device is, for callers that check the device.
    """
    # Fast path without a further call: a pipeline asks several times for each microbatch.
    if (
        type(tensor) in ORDINARY_TYPES
        and transform_stack() is None
        and forward_ad_level() < 0
        and tensor.is_cpu  # type: ignore[attr-defined]
        and tensor.layout is torch.strided  # type: ignore[attr-defined]
        and not tensor.is_nested  # type: ignore[attr-defined]
        and tensor.data_ptr() > FAR_ADDRESS  # type: ignore[attr-defined]
    ):
        return
    if not isinstance(tensor, Tensor):
        is_list = isinstance(tensor, list | tuple) and any(isinstance(each, Tensor) for each in tensor)
        advice = (
            "this rank's alone, as results are returned, or torch.cat of them" if is_list else "one, as torch.tensor(x)"
        )
        raise UnsupportedOp(f"{what} takes a tensor, not {type(tensor).__name__}: pass {advice}")
    if not has_values(tensor, takes_meta=takes_meta) and not (takes_sparse and _is_sparse(tensor)):
        raise UnsupportedOp(f"{what} takes a {_problem(tensor)}")


def has_values(tensor: Tensor, *, takes_meta: bool = False) -> bool:
    """Says whether a tensor's values stand in memory of its own; `takes_meta` as in `check_values`."""
    if stands_for_device(tensor):
        return tensor.layout is torch.strided and not tensor.is_nested
    if not _is_of_plain_class(tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if not (tensor.is_cpu or tensor.is_cuda):  # other devices need not have addresses
        return takes_meta or not tensor.is_meta
    return (has_address(tensor) or not tensor.numel()) and not is_dual(tensor)


def has_address(tensor: Tensor) -> bool:
    """Says whether a tensor of a plain class has an address; without elements it may have none.

    The address of a view in an empty storage is its offset: FSDP frees the storage that its parameters are views of.
    """
    try:
        address = tensor.data_ptr()
        return address > FAR_ADDRESS or address != tensor.storage_offset() * tensor.itemsize
    except RuntimeError:  # wrappers of torch.func: their type and all other properties are those of a plain tensor
        return False


def _is_of_plain_class(tensor: Tensor) -> bool:
    kind = type(tensor)
    if kind in ORDINARY_TYPES:
        return True
    return kind.__torch_dispatch__ is _NO_DISPATCH and not issubclass(kind, _UNINITIALIZED)


def _is_sparse(tensor: Tensor) -> bool:
    return _is_of_plain_class(tensor) and tensor.layout is torch.sparse_coo and not tensor.is_meta


def _problem(tensor: Tensor) -> str:
    """Returns the end of the error: the kind of tensor that is needed, and the fix."""
    kind = type(tensor)
    if isinstance(tensor, _UNINITIALIZED):
        return f"tensor with a shape, not {kind.__name__}: run one forward of the model first"
    if not _is_of_plain_class(tensor):
        advice = next((_ADVICE[each.__name__] for each in kind.__mro__ if each.__name__ in _ADVICE), "")
        return f"tensor with memory of its own, not {kind.__name__}: {advice or 'pass the plain tensors inside it'}"
    if tensor.is_nested:
        return "dense tensor, not a nested one: unbind it, and pass its parts"
    if tensor.layout is not torch.strided:
        return f"dense tensor, not one of layout {tensor.layout}: call .to_dense() first"
    if tensor.is_meta:
        return "tensor with values, not one on the meta device: give it memory first, such as by .to_empty()"
    try:
        tensor.data_ptr()
    except RuntimeError:
        return (
            "tensor with memory of its own, not a wrapper of torch.func (vmap, grad, jvp): call it outside of the "
            "transform"
        )
    if is_dual(tensor):
        return "tensor without a tangent of forward-mode AD: pass torch.autograd.forward_ad.unpack_dual(tensor).primal"
    return (
        "tensor with memory of its own, not one whose storage is empty: give it storage first; inside of "
        "torch.func.functionalize, call it outside"
    )


def elements_overlap(tensor: Tensor) -> bool:
    """Says whether two elements of a dense tensor stand at the same place in memory."""
    if tensor.is_contiguous():
        return False
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)
    reach, nests = 0, True  # the distance from the first to the last element of the dims looked at so far
    for stride, size in dims:
        if not size:
            return False
        if not stride:
            return True
        nests = nests and stride > reach
        reach += (size - 1) * stride
    if nests:  # each dim steps over all that those inside it reach, as in transposed and sliced tensors
        return False
    marks = torch.zeros(reach + 1, dtype=torch.uint8, device="cpu")
    marks.as_strided(tensor.shape, tensor.stride()).fill_(1)
    return int(marks.count_nonzero()) != tensor.numel()
