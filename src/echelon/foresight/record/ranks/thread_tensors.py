"""Tensors in a thread of the program: real ones on the host, and fake ones on the GPU.

The fake ones are of the rank's mode, so that the rank takes them. A mode of torch is for one thread: it has one present
kernel. So a thread never asks the mode, and computes shapes on the meta device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from echelon._torch_private.tensors import FakeTensor, as_fake, default_device_of, tree_leaves, tree_map
from echelon.call_site import calling_place, line_of, shortened
from echelon.foresight.record.gpu.device import OF_DEVICE, OnDevice, OnHost
from echelon.foresight.record.here import Recording
from echelon.foresight.record.log.placement import FACTORIES, MOVES, is_gpu, is_host

_READS = frozenset(
    {"item", "tolist", "numpy", "nonzero", "equal", "allclose", "masked_select", "unique", "__array__", "__format__"}
    | {"__bool__", "__float__", "__int__", "__index__", "__complex__", "__contains__", "is_nonzero"}
)
"""Functions whose result depends on values."""
_KEEPS = frozenset({"__set__", "requires_grad_", "register_hook", "retain_grad", "untyped_storage", "__hash__"})
"""Functions that compute nothing."""
_KEPT = (Tensor.grad, Tensor.grad_fn, Tensor.is_leaf, Tensor.requires_grad)
"""Attributes that compute nothing, and differ from those of a tensor of the meta device."""


class OfThread(TorchFunctionMode):
    """Function mode of one thread: maps devices of CUDA, and makes tensors of the GPU fake."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        assert recording.threads is not None
        self._threads = recording.threads
        self._log = recording.log
        self._placement = recording.placement
        self._real = OnHost() if recording.placement is None else OnDevice()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._threads.has_ended:
            raise SystemExit  # of this thread alone
        name = getattr(func, "__name__", "")
        # Factories take long lists of numbers.
        if name not in FACTORIES and any(isinstance(each, FakeTensor) for each in tree_leaves((args, kwargs))):
            return self._of_fake(func, name, args, kwargs)
        out = self._real.__torch_function__(func, types, args, kwargs)
        return self._on_gpu(out) if self._placement is not None and _names_gpu(func, name, args, kwargs) else out

    def _on_gpu(self, tensor: Any) -> Any:
        """Returns a tensor on the GPU in place of one on the host."""
        if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor):
            return tensor
        self._log.gpus.has_tensors = True
        self._threads.line = self._threads.line or shortened(line_of(calling_place()))
        return as_fake(self._threads.mode, tensor)

    def _of_fake(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a call with fake tensors."""
        tensor: Any = args[0] if args else None
        if name in _KEEPS or (name == "__get__" and func.__self__ in _KEPT):
            return func(*args, **kwargs)
        if name == "get_device" or (name == "__get__" and func.__self__ in OF_DEVICE):
            device = None if self._placement is None else self._placement.device_in_thread(tensor)
            if device is None:
                return func(torch.empty(0))
            return device.index if name == "get_device" else OF_DEVICE[func.__self__](device)
        if name in ("cuda", "pin_memory"):
            return tensor if isinstance(tensor, FakeTensor) else self._on_gpu(tensor)
        if name == "cpu":
            return as_fake(self._threads.mode, tensor)
        if name == "is_pinned":
            return False
        if name in ("backward", "grad"):  # the second is torch.autograd.grad
            raise self._threads.refused("computes a backward")
        if name in _READS and (name != "__format__" or not tensor.dim()):
            raise self._threads.refused(f"reads values ({name}) of a tensor that has none")
        return self._on_meta(func, name, args, kwargs)

    def _on_meta(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        originals: dict[int, tuple[Tensor, Tensor]] = {}
        """By the identity of tensors of the meta device: the given tensor, and that tensor."""
        moves = name in MOVES

        def to_meta(value: Any) -> Any:
            if is_gpu(value) or is_host(value) or (moves and type(value) is int):
                return "meta"
            if not isinstance(value, Tensor):
                return value
            meta = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta", requires_grad=value.requires_grad
            )
            originals[id(meta)] = value, meta
            return meta

        def from_meta(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            original, _ = originals.get(id(value), (None, value))
            if original is not None and (isinstance(original, FakeTensor) or not moves):
                if (original.shape, original.stride()) != (value.shape, value.stride()):
                    raise self._threads.refused(f"changes the shape of a tensor in place ({name})")
                return original
            if value.requires_grad and torch.is_grad_enabled():
                raise self._threads.refused(f"records a gradient ({name})")
            return self._on_gpu(value)

        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}  # of the host alone
        try:
            out = func(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
        except NotImplementedError as error:
            raise self._threads.refused(f"calls {name}, which needs values of a tensor that has none") from error
        return tree_map(from_meta, out)


def _names_gpu(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call makes a tensor on the GPU, or moves one there."""
    if name == "cuda" or any(map(is_gpu, (*args, *kwargs.values()))):
        return True
    if name == "to" and len(args) > 1 and type(args[1]) is int:
        return True
    device = kwargs.get("device")
    return type(device) is int or (device is None and is_gpu(default_device_of(func)))
