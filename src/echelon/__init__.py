"""Distributed training on PyTorch: plan it, check it, simulate it, run it, draw it.

The names below are the public ones. Those that need torch are imported when they are first used: torch takes seconds to
import, and neither `echelon --help` nor a pipeline schedule needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from echelon.errors import (
    AuthenticationError,
    Closed,
    CollectiveMismatch,
    ConnectError,
    DeadlockError,
    EchelonError,
    InvalidRank,
    InvalidWorldSize,
    LaunchError,
    PartitionError,
    PeerFailed,
    PlanError,
    ProtocolError,
    ScheduleError,
    SelfSend,
    SizeMismatch,
    Timeout,
    UnsupportedOp,
)

if TYPE_CHECKING:
    from echelon.data_parallel import DDP, DistributedDataParallel
    from echelon.group import ProcessGroup
    from echelon.launch.init import init
    from echelon.launch.spawn import spawn
    from echelon.mesh import Mesh
    from echelon.simulation import Simulation, simulate

_WHERE = {
    "DDP": "echelon.data_parallel",
    "DistributedDataParallel": "echelon.data_parallel",
    "Mesh": "echelon.mesh",
    "ProcessGroup": "echelon.group",
    "Simulation": "echelon.simulation",
    "init": "echelon.launch.init",
    "simulate": "echelon.simulation",
    "spawn": "echelon.launch.spawn",
}

__all__ = [
    "DDP",
    "AuthenticationError",
    "Closed",
    "CollectiveMismatch",
    "ConnectError",
    "DeadlockError",
    "DistributedDataParallel",
    "EchelonError",
    "InvalidRank",
    "InvalidWorldSize",
    "LaunchError",
    "Mesh",
    "PartitionError",
    "PeerFailed",
    "PlanError",
    "ProcessGroup",
    "ProtocolError",
    "ScheduleError",
    "SelfSend",
    "Simulation",
    "SizeMismatch",
    "Timeout",
    "UnsupportedOp",
    "init",
    "simulate",
    "spawn",
]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
