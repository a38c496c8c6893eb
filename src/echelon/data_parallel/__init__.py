"""Data parallelism: the same model on every rank, each with its own part of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from echelon.data_parallel.ddp import DDP, DistributedDataParallel

__all__ = ["DDP", "DistributedDataParallel"]


def __getattr__(name: str) -> object:
    # Imported when first used: the layout of buckets needs no torch, and neither does who only imports that.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from echelon.data_parallel import ddp

    return {"DDP": ddp.DDP, "DistributedDataParallel": ddp.DistributedDataParallel}[name]
