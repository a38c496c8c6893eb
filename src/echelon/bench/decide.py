"""From measured times to rules: which algorithm for which sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from echelon.collectives.algorithms.hosts import Hosts
from echelon.collectives.select import ANY_SIZE, SIZED, Rule, Table, Where, choose

_MARGIN = 1.05
"""How many times as long as the best the usual algorithm may take and still be kept: what is less may be chance."""

_LEAST = 1e-12
"""Seconds; simulated ranks may take none at all."""


class Timing(NamedTuple):
    """What the algorithms of an operation took for one size on one group of ranks."""

    operation: str
    hosts: Hosts
    size: int
    seconds: Mapping[str, float]

    @property
    def where(self) -> Where:
        """What a rule that follows from this is for."""
        return "several hosts" if max(self.hosts) else "one host"


def decide(timings: Iterable[Timing]) -> Table:
    """Returns the rules that follow from times: the fastest algorithm, unless the usual one is about as fast.

    Times of one operation and group stand together, by size. A rule for as many ranks as were measured counts for more
    as well, up to the next number that was measured.
    """
    table: dict[str, list[Rule]] = {}
    for (operation, hosts), group in groupby(timings, lambda timing: (timing.operation, timing.hosts)):
        decided = _by_size if operation in SIZED else _for_all_sizes
        found = decided(list(group))
        table.setdefault(operation, []).extend(rule._replace(ranks=len(hosts)) for rule in found)
    return {operation: tuple(sorted(rules, key=lambda rule: -rule.ranks)) for operation, rules in table.items()}


def _by_size(timings: Sequence[Timing]) -> list[Rule]:
    best = _without_islands([_best(timing, timing.seconds) for timing in timings])
    by_name = groupby(zip(best, timings, strict=True), lambda each: each[0])
    runs = [(name, [timing.size for _, timing in run]) for name, run in by_name]
    rules, first = [], 0
    for index, (name, sizes) in enumerate(runs):
        last = ANY_SIZE if index + 1 == len(runs) else math.isqrt(sizes[-1] * runs[index + 1][1][0])
        rules.append(Rule(name, first, last, where=timings[0].where))
        first = last + 1
    return rules


def _without_islands(names: Sequence[str]) -> list[str]:
    """Takes an algorithm that is the best for one size alone, with another on both sides, for chance."""
    inner = (
        before if before == after else name for before, name, after in zip(names, names[1:], names[2:], strict=False)
    )
    return [*names[:1], *inner, *names[1:][-1:]]


def _for_all_sizes(timings: Sequence[Timing]) -> list[Rule]:
    """Where ranks do not know each other's sizes, the least geometric mean over all sizes counts."""
    logarithms = {
        name: sum(math.log(max(timing.seconds[name], _LEAST)) for timing in timings) for name in timings[0].seconds
    }
    means = {name: math.exp(total / len(timings)) for name, total in logarithms.items()}
    return [Rule(_best(timings[0], means), where=timings[0].where)]


def _best(timing: Timing, seconds: Mapping[str, float]) -> str:
    usual = choose(timing.operation, timing.size, timing.hosts)
    fastest = min(seconds, key=lambda name: (seconds[name], name))
    return usual if seconds.get(usual, math.inf) <= seconds[fastest] * _MARGIN else fastest
