"""All algorithms, and the hosts that those which go by the hosts are tried with."""

from echelon.collectives.plans.algorithms import OPERATIONS, algorithms_of, build
from echelon.collectives.plans.algorithms.registry import find

ALL = [(operation, algorithm.name) for operation in OPERATIONS for algorithm in algorithms_of(operation)]
ROOTED = {"reduce", "broadcast", "gather", "scatter"}


def roots(operation, num_ranks):
    return {0, num_ranks // 2, num_ranks - 1} if operation in ROOTED else {0}


def layouts(num_ranks):
    """Returns hosts of as many ranks and of different numbers, next to each other and scattered, by different names."""
    ranks = range(num_ranks)
    found = {
        (0,) * num_ranks,
        tuple(ranks),
        tuple(rank // 4 for rank in ranks),
        tuple(rank % 3 for rank in ranks),
        tuple(rank * rank % 5 for rank in ranks),
        tuple("last" if rank + 1 == num_ranks else "first" for rank in ranks),
    }
    found |= {tuple(rank // size for rank in ranks) for size in (2, 3, 8) if num_ranks % size == 0}
    found |= {tuple(rank % count for rank in ranks) for count in (2, 4) if num_ranks % count == 0}
    return sorted(found, key=str)


def plan_of(operation, name, num_ranks, root=0):
    """Returns the plan of an algorithm; of one that goes by the hosts, the one for two ranks on each."""
    return build(operation, name, num_ranks, root, tuple(rank // 2 for rank in range(num_ranks)))


def plans(operation, name, num_ranks, root=0):
    """Returns the plan of an algorithm; of one that goes by the hosts, one for each of the layouts."""
    if not find(operation, name).goes_by_hosts:
        return [build(operation, name, num_ranks, root)]
    return [build(operation, name, num_ranks, root, hosts) for hosts in layouts(num_ranks)]
