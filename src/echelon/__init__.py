"""Distributed training on PyTorch: plan it, check it, simulate it, run it, draw it.

The names below are the public ones. Names that need torch are imported on first use: torch takes seconds to import, and
neither `echelon --help` nor a pipeline schedule needs it. So are the modules `echelon.amp`, `echelon.checkpoint`,
`echelon.data`, `echelon.functional`, `echelon.logging`, `echelon.pipeline`, `echelon.simulation` and `echelon.testing`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from echelon import _torch_versions
from echelon.arguments import no_attribute
from echelon.errors import (
    AuthenticationError,
    CheckpointError,
    Closed,
    CollectiveMismatch,
    ConnectError,
    DeadlockError,
    EchelonError,
    FileError,
    InvalidArgument,
    InvalidRank,
    InvalidWorldSize,
    LaunchError,
    NotFinite,
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

__version__: str
"""Version of the installed package. Read on first use."""

if TYPE_CHECKING:
    from echelon import amp as amp
    from echelon import checkpoint as checkpoint
    from echelon import data as data
    from echelon import functional as functional
    from echelon import logging as logging
    from echelon import pipeline as pipeline
    from echelon import simulation as simulation
    from echelon import testing as testing
    from echelon.backends.work import Received
    from echelon.data_parallel import DDP, DistributedDataParallel, SyncBatchNorm, ZeroOptimizer
    from echelon.foresight.run import Foreseen, foresee
    from echelon.group.group import ProcessGroup
    from echelon.group.messages import RecvFrom, SendTo
    from echelon.launch.init import flight_recorder, init
    from echelon.launch.spawn import spawn
    from echelon.mesh import Mesh
    from echelon.simulation import (
        Delay,
        Kill,
        Network,
        NetworkPartition,
        Pause,
        Simulation,
        Slow,
        explore,
        simulate,
    )

_MODULES = {
    "echelon.backends.work": ("Received",),
    "echelon.data_parallel": ("DDP", "DistributedDataParallel", "SyncBatchNorm", "ZeroOptimizer"),
    "echelon.foresight.run": ("Foreseen", "foresee"),
    "echelon.group.group": ("ProcessGroup",),
    "echelon.group.messages": ("RecvFrom", "SendTo"),
    "echelon.launch.init": ("flight_recorder", "init"),
    "echelon.launch.spawn": ("spawn",),
    "echelon.mesh": ("Mesh",),
    "echelon.simulation": (
        *("Delay", "Kill", "Network", "NetworkPartition", "Pause"),
        *("Simulation", "Slow", "explore", "simulate"),
    ),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}
_SUBMODULES = ("amp", "checkpoint", "data", "functional", "logging", "pipeline", "simulation", "testing")

__all__ = [
    "DDP",
    "AuthenticationError",
    "CheckpointError",
    "Closed",
    "CollectiveMismatch",
    "ConnectError",
    "DeadlockError",
    "Delay",
    "DistributedDataParallel",
    "EchelonError",
    "FileError",
    "Foreseen",
    "InvalidArgument",
    "InvalidRank",
    "InvalidWorldSize",
    "Kill",
    "LaunchError",
    "Mesh",
    "Network",
    "NetworkPartition",
    "NotFinite",
    "PartitionError",
    "Pause",
    "PeerFailed",
    "PlanError",
    "ProcessGroup",
    "ProtocolError",
    "Received",
    "RecvFrom",
    "ScheduleError",
    "SelfSend",
    "SendTo",
    "Simulation",
    "SizeMismatch",
    "Slow",
    "SyncBatchNorm",
    "Timeout",
    "UnsupportedOp",
    "ZeroOptimizer",
    "explore",
    "flight_recorder",
    "foresee",
    "init",
    "simulate",
    "spawn",
]


_torch_versions.warn_if_old()


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # late: it takes 20 ms

        return version("echelon")
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")  # which makes it an attribute of this module
    if name not in _WHERE:
        # Python probes a module for names such as __path__.
        known = () if name.startswith("__") else (*__all__, *_SUBMODULES)
        from echelon._names_of_others import MEANT  # late: only mistakes need it

        raise no_attribute(f"module {__name__!r}", name, known, MEANT)
    _torch_versions.require()  # before a module fails on a name that this torch lacks
    value: object = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value  # cached: Python calls __getattr__ only for missing names
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__) | set(_SUBMODULES))
