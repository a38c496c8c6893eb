"""Routing of calls by device: CPU tensors to Echelon, others to a torch group with the same ranks.

"cpu:echelon,cuda:nccl" asks torch for a group with a backend per device type, but a group written in Python has no
further backends. So it forwards calls with tensors of another device to a second torch group with the same ranks, made
at the first such call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor

from echelon._torch_private import backend_config
from echelon.backends.admission import check_values
from echelon.errors import UnsupportedOp
from echelon.group.group import ProcessGroup

P = ParamSpec("P")

_TorchGroup: Any = dist.ProcessGroup
"""Untyped: its stubs overload every method with forms that torch.distributed never calls."""


class DeviceBackend:
    """Backend of one device type, as torch queries it for its features."""

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = False
    _supports_time_estimate = False  # its name since torch 2.15

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def name(self) -> str:  # noqa: D102
        return "echelon"

    def rank(self) -> int:  # noqa: D102
        return self._group.rank

    def size(self) -> int:  # noqa: D102
        return self._group.world_size

    def supports_tensor_alloc(self, device: torch.device) -> bool:  # noqa: ARG002
        """False: all ranks allocate shared memory together, but torch's interface asks a single rank."""
        return False


class ByDevice(_TorchGroup):  # type: ignore[misc]
    """torch group for tensors on the CPU, with one further group for each other device type."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.rank, group.world_size)
        self.group = group
        """Echelon's group, which carries the CPU tensors."""
        self._elsewhere: dict[str, Any] = {}

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._backends()]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return DeviceBackend(self.group)
        if device.type not in self._backends():
            raise RuntimeError(f"no backend for tensors on {device.type} in this group")  # torch looks for this type
        return self.group_for(device)._get_backend(device)

    def group_for(self, device: torch.device) -> Any:
        """Returns torch's group for another device type. The first call makes it; every rank of the group must call.

        Raises:
            UnsupportedOp: the user named no backend for the device type.
        """
        # Made on first use, since a group written in Python has only one backend when torch makes it.
        found = self._elsewhere.get(device.type)
        if found is None:
            name = self._backends().get(device.type)
            if name is None or name == "echelon":
                raise UnsupportedOp(
                    f"a tensor on {device}, but this group carries tensors on the CPU: name a backend for the others, "
                    f'as in init_process_group("cpu:echelon,{device.type}:nccl")'
                )
            found = self._elsewhere[device.type] = dist.new_group(
                dist.get_process_group_ranks(self),
                timedelta(seconds=self.group.timeout),
                name,
                use_local_synchronization=True,  # only members of this group call
            )
        return found

    def _backends(self) -> dict[str, str]:
        """Returns the user's backend name for each device type. Empty while torch is still making the group.

        torch 2.15 asks for the devices at that time. If there were any, it would attach its flight recorder, which a
        group in Python cannot have.
        """
        config = backend_config(self)
        return dict(pair.split(":") for pair in config.split(",")) if config else {}


def by_device(
    method: Callable[Concatenate[Any, P], dist.Work], *, takes_sparse: bool = False
) -> Callable[Concatenate[Any, P], dist.Work]:
    """Decorator of a `ByDevice` method: forwards calls with tensors of another device to that device's group.

    The method raises UnsupportedOp, before anything is sent, for a tensor without memory of its own.

    Args:
        method: method of torch's interface.
        takes_sparse: whether the method accepts sparse COO tensors.
    """

    @functools.wraps(method)
    def routed(group: Any, /, *arguments: P.args, **options: P.kwargs) -> dist.Work:
        device = None
        for tensor in _tensors_of(arguments):
            check_values(tensor, method.__name__, takes_sparse=takes_sparse, takes_meta=True)
            device = tensor.device if device is None else device
        if device is None or device.type == "cpu":
            return method(group, *arguments, **options)
        elsewhere: dist.Work = getattr(group.group_for(device), method.__name__)(*arguments, **options)
        return elsewhere

    return routed


def _tensors_of(argument: object) -> Iterator[Tensor]:
    """Yields the tensors in nested lists of arguments."""
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _tensors_of(item)
