"""Copies between a device's memory and the host's, in the order of the device's stream.

Strategy. A copy to the host is queued on the caller's stream at once, after the work that computes the values. A thread
that needs them waits for that copy alone. A copy back is queued on the same stream: work that the caller queues there
afterwards sees the result, and nothing is synchronised. The host's memory is pinned, or copies would not be
asynchronous; torch keeps it until they are done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from echelon.backends.modes import normal_mode, overwrite

# Strategy of `StreamScope`. Streams belong to threads, and an asynchronous collective runs in the thread of its group's
# lane. So an event marks the caller's place in its stream at the call. The lane queues into a stream of its group,
# which waits for that event. A thread that takes the result makes its own stream wait for the end. Work that the
# caller queues in between overlaps. No thread blocks on the CPU. Groups do not share a
# stream: ranks may come to operations of two groups in different orders.

T = TypeVar("T")


class StreamScope(ABC):
    """Place of one asynchronous operation among the streams of a device. Made in the calling thread."""

    @abstractmethod
    def queued(self, function: Callable[[], T]) -> T:
        """Runs a function whose work on the device comes after all that the caller had queued before; in any thread."""

    @abstractmethod
    def join(self) -> None:
        """Makes the calling thread's stream wait for the function's work."""


class AcceleratorStreamScope(StreamScope):
    """A place among the streams of torch's accelerator."""

    def __init__(self, stream: torch.Stream) -> None:
        """Takes the caller's place in its stream; `stream` is where asynchronous operations are queued."""
        self._stream = stream
        self._begun = torch.accelerator.current_stream(stream.device).record_event()
        self._ended: torch.Event | None = None
        self._result: object = None

    def queued(self, function: Callable[[], T]) -> T:  # noqa: D102
        with self._stream:
            self._stream.wait_event(self._begun)
            try:
                self._result = result = function()
                return result
            finally:
                self._ended = self._stream.record_event()

    def join(self) -> None:  # noqa: D102
        stream = torch.accelerator.current_stream(self._stream.device)
        if self._ended is not None:
            stream.wait_event(self._ended)
        if isinstance(self._result, torch.Tensor) and not self._result.is_cpu:
            self._result.record_stream(stream)  # its memory may not be used again before this stream is done with it
        self._result = None


class HostCopy(NamedTuple):
    """A tensor that is on its way to the host's memory.

    tensor: where it will be, contiguous. wait: returns when it is there; may be called twice. copy_back: queues a copy
    of a tensor of the host behind what the caller had queued, into a tensor of the device (None: a new one), which it
    returns.
    """

    tensor: Tensor
    wait: Callable[[], object]
    copy_back: Callable[[Tensor, Tensor | None], Tensor]


class HostCopies(ABC):
    """Copies between the host and one kind of device."""

    @abstractmethod
    def handles(self, tensor: Tensor) -> bool:
        """Says whether it is a tensor of such a device."""

    @abstractmethod
    def to_host(self, tensor: Tensor) -> HostCopy:
        """Starts to copy a tensor to the host's memory."""


class AcceleratorCopies(HostCopies):
    """Copies of tensors of the accelerator that torch was built for."""

    def handles(self, tensor: Tensor) -> bool:  # noqa: D102
        accelerator = torch.accelerator.current_accelerator()
        return accelerator is not None and tensor.device.type == accelerator.type

    def to_host(self, tensor: Tensor) -> HostCopy:  # noqa: D102
        device = tensor.device
        stream = torch.accelerator.current_stream(device)
        with normal_mode():
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor.detach(), non_blocking=True)
        copied = stream.record_event()

        def copy_back(result: Tensor, place: Tensor | None) -> Tensor:
            pinned = result if result.is_pinned() else result.pin_memory()
            with stream:
                if place is None:
                    return pinned.to(device, non_blocking=True)
                overwrite(place, pinned, non_blocking=True)
                return place

        return HostCopy(host, copied.synchronize, copy_back)
