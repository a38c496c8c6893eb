"""Which ranks share a host, as data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

from echelon.collectives.plans.plan import Numbers

Hosts: TypeAlias = tuple[int, ...]
"""The host of each rank, by number: 0 is that of rank 0, and so on in the order of the ranks."""


def numbered(hosts: Sequence[object]) -> Hosts:
    """Returns the hosts by number, whatever they were called by."""
    return _numbered(tuple(hosts))


@lru_cache(maxsize=64)  # simulated ranks all ask for the same
def _numbered(hosts: tuple[object, ...]) -> Hosts:
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)


def members_of(hosts: Hosts) -> tuple[Numbers, ...]:
    """Returns the ranks of each host."""
    return tuple(tuple(rank for rank, host in enumerate(hosts) if host == number) for number in range(max(hosts) + 1))


def is_nested(hosts: Hosts) -> bool:
    """Says whether there are several hosts, and several ranks on one of them."""
    return 1 < max(hosts) + 1 < len(hosts)


def is_even(members: Sequence[Numbers]) -> bool:
    """Says whether all hosts have as many ranks."""
    return len(set(map(len, members))) == 1
