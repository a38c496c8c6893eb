"""Data parallelism: the same model on every rank, each with its own part of the batch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from echelon.data_parallel.ddp import DDP, DistributedDataParallel
    from echelon.data_parallel.hooks import AccumulateIn, CompressTo, GradientBucket, GradientHook, LocalSGD, PowerSGD
    from echelon.data_parallel.sync_batchnorm import SyncBatchNorm
    from echelon.data_parallel.zero import ZeroOptimizer

_WHERE = {
    "AccumulateIn": "echelon.data_parallel.hooks",
    "CompressTo": "echelon.data_parallel.hooks",
    "DDP": "echelon.data_parallel.ddp",
    "DistributedDataParallel": "echelon.data_parallel.ddp",
    "GradientBucket": "echelon.data_parallel.hooks",
    "GradientHook": "echelon.data_parallel.hooks",
    "LocalSGD": "echelon.data_parallel.hooks",
    "PowerSGD": "echelon.data_parallel.hooks",
    "SyncBatchNorm": "echelon.data_parallel.sync_batchnorm",
    "ZeroOptimizer": "echelon.data_parallel.zero",
}

__all__ = [
    "DDP",
    "AccumulateIn",
    "CompressTo",
    "DistributedDataParallel",
    "GradientBucket",
    "GradientHook",
    "LocalSGD",
    "PowerSGD",
    "SyncBatchNorm",
    "ZeroOptimizer",
]


def __getattr__(name: str) -> object:
    # Imported at first use: `layout` is pure, so importing it must not import torch.
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_WHERE[name]), name)
    return value
