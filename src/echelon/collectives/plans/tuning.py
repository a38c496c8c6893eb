"""File format of tables of algorithms, which `echelon tune` writes and groups read.

It is JSON of this form. A `last` of null is no limit, and "measured" is for people:

    {"echelon": "tuned collectives", "format": 1, "measured": {},
     "rules": {"all_reduce": [{"algorithm": "ring", "first": 8193, "last": null, "ranks": 4, "where": "one host"}]}}
"""

from __future__ import annotations

import json
from typing import Any, get_args

from echelon.collectives.plans.algorithms import OPERATIONS, find
from echelon.collectives.plans.select import ANY_SIZE, Rule, Table, Where
from echelon.errors import PlanError

_KIND = "tuned collectives"
_FORMAT = 1
# The file comes from outside, so its size is limited. A table that `echelon tune` writes is far smaller.
_MOST_RULES = 10_000


def to_text(table: Table, measured: dict[str, Any]) -> str:
    """Returns the text of a table, with the measurements that it follows from."""
    rules = {operation: list(map(_values, rules)) for operation, rules in table.items()}
    head = {"echelon": _KIND, "format": _FORMAT, "measured": measured}
    return json.dumps({**head, "rules": rules}, indent=1) + "\n"


def from_text(text: str, source: str) -> Table:
    """Parses the text of a table. `source` names its origin in errors.

    Raises:
        PlanError: the text is not a valid table.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: brackets nested too deeply
        raise _error(source, "it is not JSON") from None
    if not isinstance(values, dict) or values.get("echelon") != _KIND:
        raise _error(source, "it is not a table of tuned collectives")
    # A later format may mean other things by the same names, so it is refused, not guessed.
    if values.get("format") != _FORMAT:
        raise _error(source, f"its format is {values.get('format')!r}, this version reads {_FORMAT}")
    rules = values.get("rules")
    if not isinstance(rules, dict) or sum(len(each) if isinstance(each, list) else 0 for each in rules.values()) > (
        _MOST_RULES
    ):
        raise _error(source, "it has no rules, or far too many")
    return {operation: _rules(operation, each, source) for operation, each in rules.items()}


def _values(rule: Rule) -> dict[str, Any]:
    return {**rule._asdict(), "algorithm": rule.name, "last": None if rule.last == ANY_SIZE else rule.last}


def _rules(operation: str, values: object, source: str) -> tuple[Rule, ...]:
    if operation not in OPERATIONS or not isinstance(values, list):
        raise _error(source, f"it has rules for {operation!r}, which is no collective")
    return tuple(_rule(operation, value, source) for value in values)


def _rule(operation: str, values: object, source: str) -> Rule:
    if not isinstance(values, dict) or set(values) != set(Rule._fields):
        raise _error(source, f"a rule of {operation} has not exactly {', '.join(Rule._fields)}")
    last = ANY_SIZE if values["last"] is None else values["last"]
    rule = Rule(values["algorithm"], values["first"], last, values["ranks"], values["where"])
    if not isinstance(rule.algorithm, str) or rule.where not in get_args(Where):
        raise _error(source, f"a rule of {operation} is for {rule.algorithm!r} on {rule.where!r}")
    # `type`, not isinstance: JSON's true and false are bools, which are ints as well.
    if not all(type(number) is int and number >= 0 for number in (rule.first, rule.last, rule.ranks)):
        raise _error(
            source, f"a rule of {operation} has sizes {rule.first!r} to {rule.last!r} for {rule.ranks!r} ranks"
        )
    try:
        find(operation, rule.algorithm)
    except PlanError as error:
        raise _error(source, str(error)) from None
    return rule


def _error(source: str, why: str) -> PlanError:
    return PlanError(f"{source}: {why}; run `echelon tune` again, or set ECHELON_TUNED=off")
