"""Data of a data-parallel program: samples are dealt to the ranks, each exactly once an epoch."""

from echelon.data.loader import DataLoader
from echelon.data.sampler import DistributedSampler

__all__ = ["DataLoader", "DistributedSampler"]
