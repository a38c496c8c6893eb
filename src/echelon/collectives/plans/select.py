"""Selection of algorithms by a static table, which the user can override. Static, so that results repeat.

The choice depends only on values that are equal on all ranks: the operation, the ranks and their hosts, and the bytes
if all ranks must give tensors of one size. The algorithm's name travels with every message. So ranks whose users chose
differently get a CollectiveMismatch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from echelon.collectives.plans.algorithms import Algorithm, algorithms_of, build, find
from echelon.collectives.plans.algorithms.hosts import Hosts, is_even, is_nested, members_of
from echelon.collectives.plans.check import check, goal_of
from echelon.collectives.plans.plan import Plan
from echelon.errors import PlanError

SIZED = frozenset({"all_reduce", "reduce", "broadcast", "reduce_scatter"})
"""Operations whose tensors have the same size on all ranks, so that the size can decide."""
ANY_SIZE = sys.maxsize
# Number of choices that a group caches. A program with ever new sizes must not grow the cache without limit.
_MOST_CHOICES = 4096


Where: TypeAlias = Literal["anywhere", "one host", "several hosts", "even hosts"]
"""Hosts that a rule is for. Even hosts are several hosts with equally many ranks."""

_WHERE: dict[Where, Callable[[Hosts], bool]] = {
    "anywhere": lambda _: True,
    "one host": lambda hosts: max(hosts) == 0,
    "several hosts": lambda hosts: max(hosts) > 0,
    "even hosts": lambda hosts: max(hosts) > 0 and is_even(members_of(hosts)),
}


class Rule(NamedTuple):
    """Rule of a table: an algorithm for tensors of `first` to `last` bytes and at least `ranks` ranks on `where`.

    A hierarchical algorithm also needs several hosts, at least one of them with several ranks. The algorithm is a name,
    or an `Algorithm` of your own, whose plans are checked before they run.
    """

    algorithm: str | Algorithm
    first: int = 0
    last: int = ANY_SIZE
    ranks: int = 1
    where: Where = "anywhere"

    @property
    def name(self) -> str:
        """Name of the algorithm."""
        return self.algorithm if isinstance(self.algorithm, str) else self.algorithm.name

    def fits(self, operation: str, num_bytes: int, hosts: Hosts) -> bool:
        """Whether the rule applies to a call.

        Args:
            operation: the collective.
            num_bytes: bytes of its tensor. Ignored unless `operation` is in `SIZED`.
            hosts: number of each rank's host.

        Raises:
            PlanError: the operation has no algorithm of this name.
        """
        return (
            len(hosts) >= self.ranks
            and (operation not in SIZED or self.first <= num_bytes <= self.last)
            and _WHERE[self.where](hosts)
            and (not self._found(operation).goes_by_hosts or is_nested(hosts))
        )

    def _found(self, operation: str) -> Algorithm:
        return find(operation, self.algorithm) if isinstance(self.algorithm, str) else self.algorithm


Table: TypeAlias = Mapping[str, tuple[Rule, ...]]
"""Rules by operation. The first rule that fits applies."""

STATIC: Table = {
    "all_reduce": (
        Rule("hierarchical_doubling", last=64 << 10),
        Rule("hierarchical"),
        Rule("recursive_doubling", last=64 << 10),
        # The first rule that fits applies, so a rule for 9 and more ranks stands before the one for fewer.
        Rule("rabenseifner", last=16 << 20, ranks=9),
        Rule("recursive_doubling", last=512 << 10),
        Rule("rabenseifner", last=16 << 20),
        Rule("ring"),
    ),
    "reduce": (Rule("hierarchical"), Rule("binomial")),
    "broadcast": (Rule("hierarchical"), Rule("binomial")),
    "all_gather": (Rule("hierarchical", where="even hosts"), Rule("ring")),
    "reduce_scatter": (
        Rule("hierarchical", where="even hosts"),
        Rule("hierarchical", last=64 << 10),
        Rule("recursive_halving", last=4 << 20),
        Rule("ring"),
    ),
    "gather": (Rule("direct"),),
    "scatter": (Rule("direct"),),
    "all_to_all": (Rule("pairwise"),),
    "barrier": (Rule("hierarchical"), Rule("dissemination")),
}
"""Default table. For 2 to 8 ranks it follows medians over TCP on one host, see benchmarks/collectives. For more ranks,
the cost formulas favour algorithms of fewer bytes at smaller sizes, and hierarchical ones wherever a message between
hosts takes longer than one inside a host. On uneven hosts, a ring moves no more bytes for large tensors."""


def variable_of(operation: str) -> str:
    """Returns the name of the environment variable that overrides the table for an operation."""
    return f"ECHELON_{operation.upper()}"


def choose(operation: str, num_bytes: int, hosts: Hosts, overruled: str = "", table: Table = STATIC) -> str:
    """Returns the name of the algorithm to run.

    Args:
        operation: One of `algorithms.OPERATIONS`.
        num_bytes: Size of the whole tensor. Ignored unless the operation is in `SIZED`.
        hosts: The host of each rank.
        overruled: The user's override; see `parse`. The table decides sizes that it does not name.
        table: Table of rules. `STATIC` decides calls that no rule fits.

    Raises:
        PlanError: `overruled` is invalid; see `parse`.
    """
    return _rule_for(operation, num_bytes, hosts, overruled, table).name


def _rule_for(operation: str, num_bytes: int, hosts: Hosts, overruled: str, table: Table) -> Rule:
    if overruled:
        for rule in parse(operation, overruled):
            if operation not in SIZED or rule.first <= num_bytes <= rule.last:
                return rule
    # STATIC comes last and has a rule for every call, so there is always one that fits.
    rules = (*table.get(operation, ()), *STATIC[operation])
    return next(rule for rule in rules if rule.fits(operation, num_bytes, hosts))


class Choice(NamedTuple):
    """Selected algorithm of a call, with its plan."""

    algorithm: str
    plan: Plan


class Selector:
    """Selector of algorithms for one group, with a cache.

    Args:
        hosts: The host of each rank of the group; the same on every rank.
        table: Table of rules; the same on every rank.
    """

    def __init__(self, hosts: Hosts, table: Table = STATIC) -> None:
        self.hosts = hosts
        self.table = table
        self._choices: dict[tuple[str, int, int, str], Choice] = {}

    def choose(self, operation: str, num_bytes: int, root: int, overruled: str) -> Choice:
        """Returns the algorithm and the plan of a call; see the function `choose`.

        Raises:
            PlanError: the user's override is invalid, or the plan of an algorithm of the user's own is wrong.
        """
        # The override is part of the key: a program may change the environment between two calls.
        key = (operation, num_bytes, root, overruled)
        found = self._choices.get(key)
        if found is None:
            rule = _rule_for(operation, num_bytes, self.hosts, overruled, self.table)
            plan = build(operation, rule.algorithm, len(self.hosts), root, self.hosts)
            if isinstance(rule.algorithm, Algorithm):  # tests have proved the others
                _prove(operation, rule.algorithm, plan, len(self.hosts), root)
            found = Choice(rule.name, plan)
            if len(self._choices) >= _MOST_CHOICES:
                self._choices.clear()
            self._choices[key] = found
        return found


def _prove(operation: str, algorithm: Algorithm, plan: Plan, num_ranks: int, root: int) -> None:
    if algorithm.operation != operation or plan.num_ranks != num_ranks:
        made = f"a plan of {plan.num_ranks} ranks for {algorithm.operation}"
        raise PlanError(f"{algorithm.name!r} makes {made}: {operation} of this group needs one of {num_ranks} ranks")
    check(plan, goal_of(operation, plan, root))


@lru_cache(maxsize=64)
def parse(operation: str, text: str) -> tuple[Rule, ...]:
    """Parses a user's override, such as "ring" or "recursive_doubling:0-8192;ring:8193-max" with sizes in bytes.

    Raises:
        PlanError: an unknown algorithm, invalid or overlapping sizes, or sizes for an operation whose ranks may have
            tensors of different sizes.
    """
    rules = [_rule(operation, part.strip(), text) for part in text.split(";") if part.strip()]
    if not rules:
        raise _error(operation, text, "names no algorithm")
    for before, after in zip(sorted(rules, key=_first), sorted(rules, key=_first)[1:], strict=False):
        if after.first <= before.last:
            raise _error(operation, text, f"gives {max(before.first, after.first)} bytes to two algorithms")
    return tuple(rules)


def _first(rule: Rule) -> int:
    return rule.first


def _rule(operation: str, part: str, text: str) -> Rule:
    name, _, sizes = (word.strip() for word in part.partition(":"))
    try:
        find(operation, name)
    except PlanError as error:
        raise PlanError(f"{variable_of(operation)}={text!r}: {error}") from None
    if not sizes:
        return Rule(name)
    # Ranks that see different sizes would choose different algorithms.
    if operation not in SIZED:
        why = f"gives sizes, but in {operation} ranks may have tensors of different sizes"
        raise PlanError(f"{variable_of(operation)}={text!r} {why}: name one algorithm, such as {name!r}")
    first, _, last = sizes.partition("-")
    try:
        rule = Rule(name, int(first), ANY_SIZE if last.strip() == "max" else int(last))
    except ValueError:
        raise _error(operation, text, f"has sizes {sizes!r}") from None
    if not 0 <= rule.first <= rule.last:
        raise _error(operation, text, f"has sizes {sizes!r}")
    return rule


def _error(operation: str, text: str, why: str) -> PlanError:
    # The example has algorithms that run on any hosts, so it can be pasted as it is.
    names = [algorithm.name for algorithm in algorithms_of(operation) if not algorithm.goes_by_hosts]
    sizes = f"{names[-1]}:0-8192;{names[0]}:8193-max"
    example = sizes if operation in SIZED and len(names) > 1 else names[0]
    return PlanError(f"{variable_of(operation)}={text!r} {why}: write it as {example!r}")
