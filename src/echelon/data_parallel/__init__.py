"""Data parallelism: the same model on every rank, each with its own part of the batch."""

from echelon.data_parallel.ddp import DDP, DistributedDataParallel
from echelon.data_parallel.hooks import AccumulateIn, CompressTo, GradientBucket, GradientHook, LocalSGD, PowerSGD
from echelon.data_parallel.sync_batchnorm import SyncBatchNorm
from echelon.data_parallel.zero import ZeroOptimizer

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
