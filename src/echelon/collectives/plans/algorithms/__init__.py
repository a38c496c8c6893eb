"""Algorithms of collectives: pure functions from a number of ranks, or their hosts, to a plan.

p is the number of ranks. n is the number of bytes of the whole tensor: the tensor that every rank combines, broadcasts
or splits, or the result of an all-gather or gather.
"""

from echelon.collectives.plans.algorithms.hosts import Hosts, numbered
from echelon.collectives.plans.algorithms.registry import (
    OPERATIONS,
    Algorithm,
    algorithms_of,
    build,
    chunk_bytes,
    find,
)

__all__ = [
    "OPERATIONS",
    "Algorithm",
    "Hosts",
    "algorithms_of",
    "build",
    "chunk_bytes",
    "find",
    "numbered",
]
