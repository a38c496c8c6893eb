"""The algorithms of the collectives, each a pure function from a number of ranks, or their hosts, to a plan.

p is the number of ranks and n the bytes of the whole tensor: what every rank combines, broadcasts or splits, or what an
all-gather or gather brings together.
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
