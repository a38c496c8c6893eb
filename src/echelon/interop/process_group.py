"""Process group of torch.distributed over one of Echelon.

Echelon carries tensors on the CPU. "cpu:echelon,cuda:nccl" asks torch for a group with a backend per device type, but a
group written in Python has no further backends. So calls with tensors of another device are forwarded to a second torch
group with the same ranks, which the first such call makes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined] # public, by its docs

from echelon._torch_private.distributed import backend_config
from echelon._torch_private.modules import never_compiled
from echelon.backends.admission import check_values
from echelon.backends.memory import tensors_in
from echelon.call_site import sharded_call
from echelon.errors import EchelonError, UnsupportedOp
from echelon.group.group import ProcessGroup
from echelon.interop.collectives import COLLECTIVES
from echelon.interop.messages import MESSAGES
from echelon.interop.works import Coalesced, Runner
from echelon.launch.torch_store import outlasting_server

_TorchGroup: Any = dist.ProcessGroup
"""Untyped: its stubs overload every method with forms that torch.distributed never calls."""
_GRACE_SECONDS = 3.0
"""Seconds that operations get to end when a group is destroyed while an exception is handled."""


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


class EchelonProcessGroup(_TorchGroup):  # type: ignore[misc]
    """`torch.distributed.ProcessGroup` over a group of Echelon, `group`. Made by torch, see `torch_distributed`.

    Its calls are those of `COLLECTIVES` and `MESSAGES`, added below. They raise as the calls of `ProcessGroup` do, and
    UnsupportedOp for a tensor without memory of its own.
    """

    def __init__(self, group: ProcessGroup, store: Store) -> None:
        """Wraps `group`; `store` is torch's store for it."""
        super().__init__(group.rank, group.world_size)
        self.group = group
        """Echelon's group, which carries the CPU tensors."""
        self.runner = Runner(group)
        self._store = store
        self._is_aborted = False
        # torch's C++ keeps names only for groups that have C++ backends.
        self._name = self._description = ""
        self._shown = group.name
        self.elsewhere: dict[str, Any] = {}
        """By device type: torch's group for its tensors, with the same ranks."""
        self._coalesced: list[dist.Work] | None = None
        self._num_made: Counter[tuple[int, ...]] = Counter()
        """Groups of some of its ranks that were made so far."""

    def __repr__(self) -> str:
        return f"<EchelonProcessGroup {self._name!r} over {self.group!r}>"

    # Called from C++

    def getBackendName(self) -> str:  # noqa: D102, N802
        return "echelon"

    def setGroupName(self, name: str) -> None:  # noqa: D102, N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: D102, N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: D102, N802
        self._description = description
        # A device mesh describes the groups of its dim "dp" as "mesh_dp". The other two are torch's for no description.
        if description not in ("", "undefined", "default_pg"):
            self.group.name = f"{description.removeprefix('mesh_')}: {self._shown}"

    def getGroupDesc(self) -> str:  # noqa: D102, N802
        return self._description

    # Called from Python

    def name_for(self, ranks: Sequence[int]) -> str:
        """Returns the name of a new group of some ranks in errors: "ranks [0, 2]", then "ranks [0, 2], number 2"."""
        self._num_made[tuple(ranks)] += 1
        number = self._num_made[tuple(ranks)]
        return f"ranks {list(ranks)}" + (f", number {number}" if number > 1 else "")

    def get_group_store(self) -> Store:  # noqa: D102
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the default timeout of later calls.

        Raises:
            InvalidArgument: `timeout` is below 0.
        """
        self.group.timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Closes the group: finishes operations and pending sends, then frees connections that only this group uses.

        While an exception is handled, as in a `finally`, operations get 3 s to end: other ranks may never join them.

        Raises:
            EchelonError, Closed: as `ProcessGroup.close`; or an asynchronous operation failed, and nobody has asked for
                its end.
        """
        with outlasting_server(self._store) if self is dist.group.WORLD and self.rank() else nullcontext():
            try:
                if self._is_aborted:
                    pass  # which has ended all operations
                elif sys.exception() is None:
                    self.runner.finish()
                else:
                    with suppress(EchelonError):  # may be a consequence of the exception
                        self.runner.finish(_GRACE_SECONDS)
            finally:
                self.group.close()

    def abort(self) -> None:
        """Aborts the group: every rank that waits for this one raises PeerFailed."""
        self._is_aborted = True
        self.group.abort("it has aborted its torch.distributed group")

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:  # noqa: ARG002
        """Blocks until all ranks have called it. A Timeout names all ranks that have not.

        Args:
            timeout: time for all ranks together.
            wait_all_ranks: torch's; all missing ranks are named either way.

        Raises:
            Timeout: a rank did not come in time.
            CollectiveMismatch, PeerFailed, Closed: as `ProcessGroup.barrier`.
        """
        self.group.barrier(timeout=timeout.total_seconds())

    # Devices

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in _backends(self)]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return DeviceBackend(self.group)
        if device.type not in _backends(self):
            raise RuntimeError(f"no backend for tensors on {device.type} in this group")  # torch looks for this type
        return group_for(self, device)._get_backend(device)

    # Several operations at once

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cpu":
            self._coalesced = []
        else:
            group_for(self, device)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type != "cpu":
            return group_for(self, device)._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        return Coalesced(works)


def group_for(group: EchelonProcessGroup, device: torch.device) -> Any:
    """Returns torch's group for another device type. The first call makes it; every rank of the group must call.

    Raises:
        UnsupportedOp: the user named no backend for the device type.
    """
    # Made on first use, since a group written in Python has only one backend when torch makes it.
    if device.type not in group.elsewhere:
        name = _backends(group).get(device.type, "echelon")
        if name == "echelon" and device.type == "meta":
            raise UnsupportedOp("a tensor on the meta device, which has no values: pass one on the CPU")
        if name == "echelon":
            raise UnsupportedOp(
                f"a tensor on {device}, but this group carries tensors on the CPU: name a backend for the others, "
                f'as in init_process_group("cpu:echelon,{device.type}:nccl")'
            )
        group.elsewhere[device.type] = dist.new_group(
            dist.get_process_group_ranks(group),
            timedelta(seconds=group.group.timeout),
            name,
            use_local_synchronization=True,  # only members of this group call
        )
    return group.elsewhere[device.type]


def _backends(group: EchelonProcessGroup) -> dict[str, str]:
    """Returns the user's backend name for each device type. Empty while torch is still making the group.

    torch 2.15 asks for the devices at that time. If there were any, it would attach its flight recorder, which a group
    in Python cannot have.
    """
    config = backend_config(group)
    return dict(pair.split(":") for pair in config.split(",")) if config else {}


def _call(name: str, function: Callable[..., dist.Work]) -> Callable[..., Any]:
    """Makes a method of torch's interface: runs `function`, or forwards tensors of another device to their group.

    The method raises UnsupportedOp, before anything is sent, for a tensor without memory of its own.
    """

    @never_compiled
    def call(self: EchelonProcessGroup, /, *arguments: Any, **options: Any) -> Any:
        device = None
        for tensor in tensors_in(arguments):
            check_values(tensor, name, takes_sparse=name == "allreduce", takes_meta=True)
            device = tensor.device if device is None else device
        if device is not None and device.type != "cpu":
            return getattr(group_for(self, device), name)(*arguments, **options)
        if module := sharded_call():
            self.group._runner.sign(module)
        work = function(self.runner, *arguments, **options)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    call.__name__, call.__doc__ = name, function.__doc__
    return call


for _name, _function in (*COLLECTIVES.items(), *MESSAGES.items()):
    setattr(EchelonProcessGroup, _name, _call(_name, _function))
