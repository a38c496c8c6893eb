"""Names of CUDA on a machine without a GPU: devices are mapped to fake tensors of the CPU, streams to stand-ins.

torch's autograd on fake tensors of CUDA needs a build for CUDA, and a GPU. So what a program asks to be on "cuda" is on
the CPU for torch, and on the device for the recorder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from echelon._torch_private import optimizers_as_on_gpu, real_tensors
from echelon.foresight.record import streams
from echelon.foresight.record.here import recording_here


def mapped(value: Any) -> Any:
    """Returns the CPU for a device of CUDA. Other values are returned as they are."""
    if isinstance(value, str):
        return "cpu" if value == "cuda" or value.startswith("cuda:") else value
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


class CudaNames(TorchFunctionMode):  # type: ignore[no-untyped-call]
    """Maps devices of CUDA in calls of torch."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if args:
            args = tuple(mapped(each) if isinstance(each, str | torch.device) else each for each in args)
        if kwargs:
            kwargs = {
                name: mapped(each) if isinstance(each, str | torch.device) else each for name, each in kwargs.items()
            }
            return func(*args, **kwargs)
        return func(*args)


_HANDLES: dict[str, Any] = {
    "Stream": streams.Stream,
    "Event": streams.Event,
    "current_stream": streams.current_stream,
    "stream": streams.InStream,
    "synchronize": streams.synchronize,
}
"""Names that `torch.cuda` and `torch.cpu` share. FSDP2 asks the module of its mesh's device for them."""


@contextmanager
def cuda_names(num_devices: Callable[[], int]) -> Iterator[None]:
    """Inside, names of CUDA work in threads of recorded ranks.

    Args:
        num_devices: Returns the number of GPUs of a host.
    """
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(owner, name, value, create=True))

        modules: tuple[ModuleType, ...] = (torch.cuda, torch.cpu)
        for module in modules:
            for name, value in _HANDLES.items():
                replace(module, name, value)
        for name, value in {
            "is_available": lambda: True,
            "device_count": num_devices,
            "current_device": lambda: 0,
            "set_device": lambda _: None,
            "default_stream": streams.default_stream,
            "set_stream": streams.set_stream,
        }.items():
            replace(torch.cuda, name, value)
        stack.enter_context(optimizers_as_on_gpu())
        replace(DeviceMesh, "__init__", _really(DeviceMesh.__init__))
        for name in ("__getitem__", "_flatten"):
            replace(DeviceMesh, name, _really(getattr(DeviceMesh, name)))
        replace(torch.UntypedStorage, "resize_", _resizing(torch.UntypedStorage.resize_))
        yield


def _really(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of a mesh, whose tensors are ranks: they have to have values."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if recording_here() is None:
            return method(*args, **kwargs)
        with real_tensors():
            return method(*map(mapped, args), **{name: mapped(each) for name, each in kwargs.items()})

    return call


def _resizing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        if (recording := recording_here()) is not None:
            recording.memory.resized(storage)
        return result

    return resize_
