"""The algorithms by operation and name, with what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from echelon.collectives.algorithms.binomial import binomial_broadcast, binomial_reduce
from echelon.collectives.algorithms.binomial_scatter import (
    binomial_gather,
    binomial_scatter,
    scatter_all_gather_broadcast,
)
from echelon.collectives.algorithms.bruck import bruck_all_to_all
from echelon.collectives.algorithms.direct import direct_gather, direct_scatter
from echelon.collectives.algorithms.dissemination import dissemination_barrier
from echelon.collectives.algorithms.hierarchical import hierarchical_all_reduce
from echelon.collectives.algorithms.pairwise import pairwise_all_to_all
from echelon.collectives.algorithms.recursive_doubling import recursive_doubling_all_reduce
from echelon.collectives.algorithms.recursive_halving import (
    rabenseifner_all_reduce,
    recursive_doubling_all_gather,
    recursive_halving_reduce_scatter,
)
from echelon.collectives.algorithms.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from echelon.collectives.plan import Plan
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
    """One way to do an operation, and its cost as formulas that Python can evaluate.

    In them p is the number of ranks, n the bytes, lg(p) the rounded up and floor_lg(p) the rounded down logarithm to
    base 2, odd(p) 1 if p is no power of two and else 0, and bits(p) the number of ones in 0, 1, ..., p - 1 in binary.
    A message of b bytes takes alpha + b beta, combining b bytes takes b gamma.
    """

    operation: str
    name: str
    make: Callable[[int, int], Plan]
    """Of the number of ranks and the root; the root counts where the operation has one."""
    rounds: str
    cost: str


_HIERARCHICAL = "hierarchical"
"""Needs to know the hosts, so it is no `Algorithm`."""

_ALGORITHMS = (
    Algorithm(
        "all_reduce",
        "ring",
        lambda p, _: ring_all_reduce(p),
        "2*(p-1)",
        "2*(p-1)*alpha + 2*n*(p-1)/p*beta + n*(p-1)/p*gamma",
    ),
    Algorithm(
        "all_reduce",
        "recursive_doubling",
        lambda p, _: recursive_doubling_all_reduce(p),
        "floor_lg(p) + 2*odd(p)",
        "(floor_lg(p) + 2*odd(p))*(alpha + n*beta) + (floor_lg(p) + odd(p))*n*gamma",
    ),
    Algorithm(
        "all_reduce",
        "rabenseifner",
        lambda p, _: rabenseifner_all_reduce(p),
        "2*lg(p)",
        "2*lg(p)*alpha + 2*n*(p-1)/p*beta + n*(p-1)/p*gamma",
    ),
    Algorithm("reduce", "binomial", binomial_reduce, "lg(p)", "lg(p)*(alpha + n*beta + n*gamma)"),
    Algorithm("broadcast", "binomial", binomial_broadcast, "lg(p)", "lg(p)*(alpha + n*beta)"),
    Algorithm(
        "broadcast",
        "scatter_all_gather",
        scatter_all_gather_broadcast,
        "lg(p) + p-1",
        "(lg(p) + p-1)*alpha + 2*n*(p-1)/p*beta",
    ),
    Algorithm("all_gather", "ring", lambda p, _: ring_all_gather(p), "p-1", "(p-1)*alpha + n*(p-1)/p*beta"),
    Algorithm(
        "all_gather",
        "recursive_doubling",
        lambda p, _: recursive_doubling_all_gather(p),
        "lg(p)",
        "lg(p)*alpha + n*(p-1)/p*beta",
    ),
    Algorithm(
        "reduce_scatter",
        "ring",
        lambda p, _: ring_reduce_scatter(p),
        "p-1",
        "(p-1)*alpha + n*(p-1)/p*(beta + gamma)",
    ),
    Algorithm(
        "reduce_scatter",
        "recursive_halving",
        lambda p, _: recursive_halving_reduce_scatter(p),
        "lg(p)",
        "lg(p)*alpha + n*(p-1)/p*(beta + gamma)",
    ),
    Algorithm("gather", "direct", direct_gather, "min(p-1, 1)", "(p-1)*alpha + n*(p-1)/p*beta"),
    Algorithm("gather", "binomial", binomial_gather, "lg(p)", "lg(p)*alpha + n*(p-1)/p*beta"),
    Algorithm("scatter", "direct", direct_scatter, "min(p-1, 1)", "(p-1)*alpha + n*(p-1)/p*beta"),
    Algorithm("scatter", "binomial", binomial_scatter, "lg(p)", "lg(p)*alpha + n*(p-1)/p*beta"),
    Algorithm("all_to_all", "pairwise", lambda p, _: pairwise_all_to_all(p), "p-1", "(p-1)*alpha + n*(p-1)/p*beta"),
    Algorithm("all_to_all", "bruck", lambda p, _: bruck_all_to_all(p), "lg(p)", "lg(p)*alpha + n*bits(p)/p*beta"),
    Algorithm("barrier", "dissemination", lambda p, _: dissemination_barrier(p), "lg(p)", "lg(p)*alpha"),
)
_BY_NAME = {(algorithm.operation, algorithm.name): algorithm for algorithm in _ALGORITHMS}


def algorithms_of(operation: str) -> tuple[Algorithm, ...]:
    """Returns the algorithms that a group can run an operation with.

    Raises:
        PlanError: there is no such operation.
    """
    if operation not in OPERATIONS:
        raise PlanError(f"no collective is called {operation!r}: choose from {', '.join(OPERATIONS)}")
    return tuple(algorithm for algorithm in _ALGORITHMS if algorithm.operation == operation)


def find(operation: str, name: str) -> Algorithm:
    """Returns an algorithm by name.

    Raises:
        PlanError: there is none of that name.
    """
    found = _BY_NAME.get((operation, name))
    if found is None:
        known = ", ".join(algorithm.name for algorithm in algorithms_of(operation))
        raise PlanError(f"{operation} has no algorithm {name!r}: choose from {known}")
    return found


def build(operation: str, name: str, num_ranks: int, root: int = 0, hosts: Sequence[object] | None = None) -> Plan:
    """Makes the plan of a named algorithm.

    Args:
        operation: one of `OPERATIONS`.
        name: one of `algorithms_of(operation)`; for all_reduce also "hierarchical".
        num_ranks: how many ranks take part.
        root: the rank that a broadcast or scatter comes from, or that a reduce or gather goes to.
        hosts: for "hierarchical": the host of each rank.

    Raises:
        PlanError: an unknown name, or hosts that are missing, too many, or of no use to the algorithm.
        InvalidWorldSize, InvalidRank: there can be no such ranks.
    """
    if num_ranks < 1:
        raise InvalidWorldSize(f"num_ranks={num_ranks}: a plan has at least 1 rank")
    if not 0 <= root < num_ranks:
        raise InvalidRank(root, num_ranks, "root")
    if (operation, name) == ("all_reduce", _HIERARCHICAL):
        if hosts is None or len(hosts) != num_ranks:
            given = "no hosts" if hosts is None else f"{len(hosts)} hosts"
            raise PlanError(f"hierarchical: {given} for {num_ranks} ranks: give the host of each rank, as hosts=(0, 0)")
        return hierarchical_all_reduce(hosts)
    algorithm = find(operation, name)
    if hosts is not None:
        raise PlanError(f"hosts: {operation} by {name} looks at no hosts; leave them out, or take hierarchical")
    return algorithm.make(num_ranks, root)


def chunk_bytes(operation: str, plan: Plan, num_bytes: int) -> Fraction:
    """Returns the size of one chunk of a plan, when the whole tensor has `num_bytes` and its chunks are equal."""
    if operation == "barrier":
        return Fraction(0)
    return Fraction(num_bytes, plan.num_ranks if operation == "all_to_all" else plan.num_chunks)
