"""Hosts of ranks as data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

from echelon.collectives.plans.plan import Numbers

Hosts: TypeAlias = tuple[int, ...]
"""Number of each rank's host. Hosts are numbered from 0 in the order of their first ranks."""


def numbered(hosts: Sequence[object]) -> Hosts:
    """Returns the hosts by number, from any names."""
    return _numbered(tuple(hosts))


@lru_cache(maxsize=64)  # all simulated ranks ask for the same hosts
def _numbered(hosts: tuple[object, ...]) -> Hosts:
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)


def members_of(hosts: Hosts) -> tuple[Numbers, ...]:
    """Returns the ranks of each host."""
    return tuple(tuple(rank for rank, host in enumerate(hosts) if host == number) for number in range(max(hosts) + 1))


def is_nested(hosts: Hosts) -> bool:
    """Whether there are several hosts, at least one of them with several ranks."""
    return 1 < max(hosts) + 1 < len(hosts)


def is_even(members: Sequence[Numbers]) -> bool:
    """Whether all hosts have equally many ranks."""
    return len(set(map(len, members))) == 1
