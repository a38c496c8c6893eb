"""Which algorithm an operation runs by: a static table, so that results repeat, which the user can overrule.

The choice depends on what is the same on all ranks: the operation, the number of ranks, and the bytes where all ranks
must give tensors of one size. The algorithm's name travels with every message, so ranks that were told to choose
differently get a CollectiveMismatch.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import NamedTuple

from echelon.collectives.algorithms import algorithms_of, find
from echelon.errors import PlanError

SIZED = frozenset({"all_reduce", "reduce", "broadcast", "reduce_scatter"})
"""The operations that know how many bytes the other ranks have."""
_ANY = sys.maxsize


class Rule(NamedTuple):
    """An algorithm for tensors of `first` to `last` bytes, and for at least `ranks` ranks."""

    algorithm: str
    first: int = 0
    last: int = _ANY
    ranks: int = 1


TABLE: dict[str, tuple[Rule, ...]] = {
    "all_reduce": (
        Rule("recursive_doubling", last=64 << 10),
        Rule("rabenseifner", last=16 << 20, ranks=9),
        Rule("recursive_doubling", last=512 << 10),
        Rule("rabenseifner", last=16 << 20),
        Rule("ring"),
    ),
    "reduce": (Rule("binomial"),),
    "broadcast": (Rule("binomial"),),
    "all_gather": (Rule("ring"),),
    "reduce_scatter": (Rule("recursive_halving", last=4 << 20), Rule("ring")),
    "gather": (Rule("direct"),),
    "scatter": (Rule("direct"),),
    "all_to_all": (Rule("pairwise"),),
    "barrier": (Rule("dissemination"),),
}
"""The first rule that fits counts. From medians over TCP with 2 to 8 ranks on one host, see benchmarks/collectives; for
more ranks the formulas speak for fewer bytes sooner."""


def variable_of(operation: str) -> str:
    """Returns the environment variable that overrules the table for an operation."""
    return f"ECHELON_{operation.upper()}"


def choose(operation: str, num_bytes: int, num_ranks: int, overruled: str = "") -> str:
    """Returns the name of the algorithm to run.

    Args:
        operation: one of `algorithms.OPERATIONS`.
        num_bytes: of the whole tensor; of no account unless the operation is among `SIZED`.
        num_ranks: how many ranks take part.
        overruled: what the user says; see `parse`. Sizes that it does not name are left to the table.

    Raises:
        PlanError: `overruled` says what cannot be.
    """
    rules = TABLE[operation]
    if overruled:
        rules = parse(operation, overruled) + rules
    for rule in rules:
        if num_ranks >= rule.ranks and (operation not in SIZED or rule.first <= num_bytes <= rule.last):
            return rule.algorithm
    raise AssertionError("the last rule of the table fits always")


@lru_cache(maxsize=64)
def parse(operation: str, text: str) -> tuple[Rule, ...]:
    """Reads what overrules the table, such as "recursive_doubling:0-8192;ring:8193-max", sizes in bytes, or "ring".

    Raises:
        PlanError: an unknown algorithm, sizes that are none or overlap, or sizes for an operation whose ranks may have
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
    if operation not in SIZED:
        why = f"gives sizes, but in {operation} ranks may have tensors of different sizes"
        raise PlanError(f"{variable_of(operation)}={text!r} {why}: name one algorithm, such as {name!r}")
    first, _, last = sizes.partition("-")
    try:
        rule = Rule(name, int(first), _ANY if last.strip() == "max" else int(last))
    except ValueError:
        raise _error(operation, text, f"has sizes {sizes!r}") from None
    if not 0 <= rule.first <= rule.last:
        raise _error(operation, text, f"has sizes {sizes!r}")
    return rule


def _error(operation: str, text: str, why: str) -> PlanError:
    names = [algorithm.name for algorithm in algorithms_of(operation)]
    sizes = f"{names[-1]}:0-8192;{names[0]}:8193-max"
    example = sizes if operation in SIZED and len(names) > 1 else names[0]
    return PlanError(f"{variable_of(operation)}={text!r} {why}: write it as {example!r}")
