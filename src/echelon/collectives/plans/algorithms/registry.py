"""Registry of algorithms by operation and name, with their costs as formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from echelon.arguments import choices
from echelon.collectives.plans.algorithms.binomial import (
    binomial_broadcast,
    binomial_gather,
    binomial_reduce,
    binomial_scatter,
    scatter_all_gather_broadcast,
)
from echelon.collectives.plans.algorithms.bruck import bruck_all_to_all
from echelon.collectives.plans.algorithms.direct import direct_gather, direct_scatter
from echelon.collectives.plans.algorithms.dissemination import dissemination_barrier
from echelon.collectives.plans.algorithms.hierarchical import (
    hierarchical_all_gather,
    hierarchical_all_reduce,
    hierarchical_barrier,
    hierarchical_broadcast,
    hierarchical_doubling_all_reduce,
    hierarchical_reduce,
    hierarchical_reduce_scatter,
)
from echelon.collectives.plans.algorithms.hosts import Hosts, numbered
from echelon.collectives.plans.algorithms.pairwise import pairwise_all_to_all
from echelon.collectives.plans.algorithms.recursive_doubling import recursive_doubling_all_reduce
from echelon.collectives.plans.algorithms.recursive_halving import (
    rabenseifner_all_reduce,
    recursive_doubling_all_gather,
    recursive_halving_reduce_scatter,
)
from echelon.collectives.plans.algorithms.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from echelon.collectives.plans.plan import Plan
from echelon.errors import InvalidRank, InvalidWorldSize, PlanError

OPERATIONS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)


class Algorithm(NamedTuple):
    """Algorithm of an operation, with its cost as formulas that Python can evaluate.

    In the formulas p is the number of ranks and n the number of bytes. lg(p) is the logarithm to base 2 rounded up,
    floor_lg(p) rounded down. odd(p) is 1 if p is no power of two, else 0. bits(p) is the number of ones in 0, 1, ...,
    p - 1 in binary. A message of b bytes takes alpha + b beta, combining b bytes takes b gamma. In algorithms that go
    by the hosts there are h hosts of k ranks each, and a message inside a host takes local_alpha + b local_beta.

    An algorithm of your own needs no formulas. A `Rule` of a group's table may hold it in place of a name.

    Args:
        operation: one of `OPERATIONS`.
        name: name of the algorithm.
        rounds: number of rounds, as a formula.
        cost: seconds, as a formula.
        goes_by_hosts: whether the plan depends on the ranks that share a host.
    """

    operation: str
    name: str
    make: Callable[[Hosts, int], Plan]
    """Makes the plan from the host of each rank and the root. Operations without a root ignore it."""
    rounds: str = ""
    cost: str = ""
    goes_by_hosts: bool = False


def _flat(make: Callable[[int], Plan]) -> Callable[[Hosts, int], Plan]:
    return lambda hosts, _: make(len(hosts))


def _rooted(make: Callable[[int, int], Plan]) -> Callable[[Hosts, int], Plan]:
    return lambda hosts, root: make(len(hosts), root)


# Formulas are text: the docs show them, and the tests evaluate them and compare them with the simulation.
_ALGORITHMS = (
    Algorithm(
        "all_reduce",
        "ring",
        _flat(ring_all_reduce),
        "2*(p-1)",
        "2*(p-1)*alpha + 2*n*(p-1)/p*beta + n*(p-1)/p*gamma",
    ),
    Algorithm(
        "all_reduce",
        "recursive_doubling",
        _flat(recursive_doubling_all_reduce),
        "floor_lg(p) + 2*odd(p)",
        "(floor_lg(p) + 2*odd(p))*(alpha + n*beta) + (floor_lg(p) + odd(p))*n*gamma",
    ),
    Algorithm(
        "all_reduce",
        "rabenseifner",
        _flat(rabenseifner_all_reduce),
        "2*lg(p)",
        "2*lg(p)*alpha + 2*n*(p-1)/p*beta + n*(p-1)/p*gamma",
    ),
    Algorithm(
        "all_reduce",
        "hierarchical",
        lambda hosts, _: hierarchical_all_reduce(hosts),
        "2*lg(k) + 2*lg(h)",
        "2*lg(k)*local_alpha + n*(k-1)/k*(2*local_beta + gamma) + 2*lg(h)*alpha + n/k*(h-1)/h*(2*beta + gamma)",
        goes_by_hosts=True,
    ),
    Algorithm(
        "all_reduce",
        "hierarchical_doubling",
        lambda hosts, _: hierarchical_doubling_all_reduce(hosts),
        "floor_lg(k) + 2*odd(k) + floor_lg(h) + 2*odd(h)",
        "(floor_lg(k) + 2*odd(k))*(local_alpha + n*local_beta) + (floor_lg(h) + 2*odd(h))*(alpha + n*beta)"
        " + (floor_lg(k) + odd(k) + floor_lg(h) + odd(h))*n*gamma",
        goes_by_hosts=True,
    ),
    Algorithm("reduce", "binomial", _rooted(binomial_reduce), "lg(p)", "lg(p)*(alpha + n*beta + n*gamma)"),
    Algorithm(
        "reduce",
        "hierarchical",
        hierarchical_reduce,
        "lg(k) + lg(h)",
        "lg(k)*(local_alpha + n*local_beta + n*gamma) + lg(h)*(alpha + n*beta + n*gamma)",
        goes_by_hosts=True,
    ),
    Algorithm("broadcast", "binomial", _rooted(binomial_broadcast), "lg(p)", "lg(p)*(alpha + n*beta)"),
    Algorithm(
        "broadcast",
        "scatter_all_gather",
        _rooted(scatter_all_gather_broadcast),
        "lg(p) + p-1",
        "(lg(p) + p-1)*alpha + 2*n*(p-1)/p*beta",
    ),
    Algorithm(
        "broadcast",
        "hierarchical",
        hierarchical_broadcast,
        "lg(h) + lg(k)",
        "lg(h)*(alpha + n*beta) + lg(k)*(local_alpha + n*local_beta)",
        goes_by_hosts=True,
    ),
    Algorithm("all_gather", "ring", _flat(ring_all_gather), "p-1", "(p-1)*alpha + n*(p-1)/p*beta"),
    Algorithm(
        "all_gather",
        "recursive_doubling",
        _flat(recursive_doubling_all_gather),
        "lg(p)",
        "lg(p)*alpha + n*(p-1)/p*beta",
    ),
    Algorithm(
        "all_gather",
        "hierarchical",
        lambda hosts, _: hierarchical_all_gather(hosts),
        "lg(h) + lg(k)",
        "lg(h)*alpha + n*(h-1)/p*beta + lg(k)*local_alpha + n*(k-1)/k*local_beta",
        goes_by_hosts=True,
    ),
    Algorithm(
        "reduce_scatter",
        "ring",
        _flat(ring_reduce_scatter),
        "p-1",
        "(p-1)*alpha + n*(p-1)/p*(beta + gamma)",
    ),
    Algorithm(
        "reduce_scatter",
        "recursive_halving",
        _flat(recursive_halving_reduce_scatter),
        "lg(p)",
        "lg(p)*alpha + n*(p-1)/p*(beta + gamma)",
    ),
    Algorithm(
        "reduce_scatter",
        "hierarchical",
        lambda hosts, _: hierarchical_reduce_scatter(hosts),
        "lg(k) + lg(h)",
        "lg(k)*local_alpha + n*(k-1)/k*(local_beta + gamma) + lg(h)*alpha + n*(h-1)/p*(beta + gamma)",
        goes_by_hosts=True,
    ),
    Algorithm("gather", "direct", _rooted(direct_gather), "min(p-1, 1)", "(p-1)*alpha + n*(p-1)/p*beta"),
    Algorithm("gather", "binomial", _rooted(binomial_gather), "lg(p)", "lg(p)*alpha + n*(p-1)/p*beta"),
    Algorithm("scatter", "direct", _rooted(direct_scatter), "min(p-1, 1)", "(p-1)*alpha + n*(p-1)/p*beta"),
    Algorithm("scatter", "binomial", _rooted(binomial_scatter), "lg(p)", "lg(p)*alpha + n*(p-1)/p*beta"),
    Algorithm("all_to_all", "pairwise", _flat(pairwise_all_to_all), "p-1", "(p-1)*alpha + n*(p-1)/p*beta"),
    Algorithm("all_to_all", "bruck", _flat(bruck_all_to_all), "lg(p)", "lg(p)*alpha + n*bits(p)/p*beta"),
    Algorithm("barrier", "dissemination", _flat(dissemination_barrier), "lg(p)", "lg(p)*alpha"),
    Algorithm(
        "barrier",
        "hierarchical",
        lambda hosts, _: hierarchical_barrier(hosts),
        "lg(k) + lg(h)",
        "lg(k)*local_alpha + lg(h)*alpha",
        goes_by_hosts=True,
    ),
)
_BY_NAME = {(algorithm.operation, algorithm.name): algorithm for algorithm in _ALGORITHMS}


def algorithms_of(operation: str) -> tuple[Algorithm, ...]:
    """Returns the algorithms of an operation.

    Raises:
        PlanError: there is no such operation.
    """
    if operation not in OPERATIONS:
        raise PlanError(f"no collective is called {operation!r}: {choices(operation, OPERATIONS, 'choose from')}")
    return tuple(algorithm for algorithm in _ALGORITHMS if algorithm.operation == operation)


def find(operation: str, name: str) -> Algorithm:
    """Returns an algorithm by name.

    Args:
        operation: one of `OPERATIONS`.
        name: name of the algorithm.

    Raises:
        PlanError: there is no algorithm of that name.
    """
    found = _BY_NAME.get((operation, name))
    if found is None:
        known = [algorithm.name for algorithm in algorithms_of(operation)]
        raise PlanError(f"{operation} has no algorithm {name!r}: {choices(name, known, 'choose from')}")
    return found


def build(
    operation: str, name: str | Algorithm, num_ranks: int, root: int = 0, hosts: Sequence[object] | None = None
) -> Plan:
    """Returns the plan of an algorithm.

    Args:
        operation: One of `OPERATIONS`.
        name: Name of one of `algorithms_of(operation)`, or an algorithm.
        num_ranks: Number of ranks.
        root: Source rank of a broadcast or scatter, destination rank of a reduce or gather.
        hosts: The host of each rank, by any name. Needed by algorithms that go by the hosts, ignored by others.

    Raises:
        PlanError: an unknown name, or hosts that are missing or not one for each rank.
        InvalidWorldSize, InvalidRank: fewer than 1 rank, or a root outside of them.
    """
    if num_ranks < 1:
        raise InvalidWorldSize(f"num_ranks={num_ranks}: a plan has at least 1 rank: give 1 or more")
    if not 0 <= root < num_ranks:
        raise InvalidRank(root, num_ranks, "root")
    algorithm = name if isinstance(name, Algorithm) else find(operation, name)
    # Any hosts do for an algorithm that ignores them.
    if hosts is None and not algorithm.goes_by_hosts:
        return algorithm.make((0,) * num_ranks, root)
    if hosts is None or len(hosts) != num_ranks:
        given = "no hosts" if hosts is None else f"{len(hosts)} hosts"
        raise PlanError(f"{algorithm.name}: {given} for {num_ranks} ranks: give the host of each rank, as hosts=(0, 0)")
    return algorithm.make(numbered(hosts), root)


def chunk_bytes(operation: str, plan: Plan, num_bytes: int) -> Fraction:
    """Returns the bytes of one chunk of a plan, if all chunks are equal.

    Args:
        operation: one of `OPERATIONS`.
        plan: its plan.
        num_bytes: bytes of the whole tensor.
    """
    if operation == "barrier":
        return Fraction(0)
    # Plans of all_to_all have p chunks to send and p to receive, but n counts a rank's tensor once.
    return Fraction(num_bytes, plan.num_ranks if operation == "all_to_all" else plan.num_chunks)
