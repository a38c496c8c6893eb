"""Copies between a device's memory and the host's, in the order of the device's stream.

Strategy. A copy to the host is queued on the caller's stream at once, behind what computes the values; whoever needs
them waits for that copy alone, in whatever thread. A copy back is queued on the same stream: what the caller queues
there afterwards sees the result, and nothing is synchronised. The host's memory is pinned, or copies would not be
asynchronous; torch keeps it until they are done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.backends.modes import normal_mode, overwrite


class Landing(NamedTuple):
    """A tensor that is on its way to the host's memory.

    tensor: where it will be, contiguous. wait: returns when it is there; may be called twice. take_back: queues a copy
    of a tensor of the host behind what the caller had queued, into a tensor of the device (None: a new one), which it
    returns.
    """

    tensor: Tensor
    wait: Callable[[], object]
    take_back: Callable[[Tensor, Tensor | None], Tensor]


class HostCopies(ABC):
    """How tensors of some kind of device are copied."""

    @abstractmethod
    def handles(self, tensor: Tensor) -> bool:
        """Says whether it is a tensor of such a device."""

    @abstractmethod
    def to_host(self, tensor: Tensor) -> Landing:
        """Starts to copy a tensor to the host's memory."""


class AcceleratorCopies(HostCopies):
    """Copies of tensors of the accelerator that torch was built for."""

    def handles(self, tensor: Tensor) -> bool:  # noqa: D102
        accelerator = torch.accelerator.current_accelerator()
        return accelerator is not None and tensor.device.type == accelerator.type

    def to_host(self, tensor: Tensor) -> Landing:  # noqa: D102
        device = tensor.device
        stream = torch.accelerator.current_stream(device)
        with normal_mode():
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor.detach(), non_blocking=True)
        copied = stream.record_event()

        def take_back(result: Tensor, place: Tensor | None) -> Tensor:
            pinned = result if result.is_pinned() else result.pin_memory()
            with stream:
                if place is None:
                    return pinned.to(device, non_blocking=True)
                overwrite(place, pinned, non_blocking=True)
                return place

        return Landing(host, copied.synchronize, take_back)
