"""Text form of faults, as the command line takes them: `kill:2@op=17`, `delay:0-1:0.5`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from echelon.arguments import choices
from echelon.errors import LaunchError

if TYPE_CHECKING:
    from echelon.simulation.faults import Fault

FORMS = MappingProxyType(
    {
        "kill": "kill:2@op=17 (at its 17th message) or kill:2@t=0.5 (at 0.5 s)",
        "delay": "delay:0-1:0.5 (from rank 0 to 1, 0.5 s later; * is any rank)",
        "slow": "slow:1x3 (computes 3 times as long)",
        "partition": "partition:0,1|2,3",
        "pause": "pause:1@0.5-1.0",
    }
)
"""An example of each kind of fault, by its name."""

IN_WORDS = "; ".join(FORMS.values()) + ". delay and partition take a time, too, as in partition:0|1@0.5-1.0"
"""All forms in a sentence, for the help of a command."""

_NUMBER = r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)"
_INTERVAL = rf"(?:@{_NUMBER}-{_NUMBER}?)?"
_RANKS = r"(\d+(?:[-,]\d+)*)"
_PATTERNS = MappingProxyType(
    {
        "kill": re.compile(rf"(\d+)@(?:op=(\d+)|t={_NUMBER})"),
        "delay": re.compile(rf"(\d+|\*)-(\d+|\*):{_NUMBER}{_INTERVAL}"),
        "slow": re.compile(rf"(\d+)x{_NUMBER}"),
        "partition": re.compile(rf"{_RANKS}\|{_RANKS}{_INTERVAL}"),
        "pause": re.compile(rf"(\d+)@{_NUMBER}-{_NUMBER}?"),
    }
)
_BETWEEN = re.compile(r",(?=\s*[a-z]+:)")
"""Comma between two faults. The commas of a partition have no name after them."""


def parse(texts: Iterable[str], num_ranks: int) -> list[Fault]:
    """Returns the faults of some texts, each with one fault or several, separated by commas.

    Args:
        texts: the texts.
        num_ranks: number of ranks of the world.

    Raises:
        LaunchError: a text is no fault, or names a rank that the world does not have.
    """
    return [_fault(part.strip(), num_ranks) for text in texts for part in _BETWEEN.split(text)]


def _fault(text: str, num_ranks: int) -> Fault:
    kind, _, details = text.partition(":")
    if kind not in _PATTERNS:
        raise LaunchError(f"--faults {text}: {choices(kind, _PATTERNS)}, such as {FORMS['kill']}")
    found = _PATTERNS[kind].fullmatch(details)
    if found is None:
        raise LaunchError(f"--faults {text}: write it as {FORMS[kind]}")
    # Late: the package imports torch, which takes seconds that `--help` and the errors above need not wait.
    from echelon.simulation.faults import ranks_of

    try:
        fault = _made(kind, found.groups())
    except LaunchError as error:
        # Without the spelling of Python, such as "Slow(rank=1, factor=0.0): ".
        raise LaunchError(f"--faults {text}: {str(error).partition(': ')[2]}") from None
    if wrong := [rank for rank in ranks_of(fault) if rank >= num_ranks]:
        ranks = "0" if num_ranks == 1 else f"0 to {num_ranks - 1}"
        raise LaunchError(f"--faults {text}: {wrong[0]} is not one of {num_ranks} ranks: use {ranks}")
    return fault


def _made(kind: str, parts: tuple[Any, ...]) -> Fault:
    from echelon.simulation.faults import Delay, Kill, NetworkPartition, Pause, Slow

    match kind:
        case "kill":
            at_op, at = parts[1:]
            return Kill(int(parts[0]), None if at is None else float(at), None if at_op is None else int(at_op))
        case "delay":
            src, dst = (None if rank == "*" else int(rank) for rank in parts[:2])
            return Delay(float(parts[2]), src, dst, *_interval(*parts[3:]))
        case "slow":
            return Slow(int(parts[0]), float(parts[1]))
        case "partition":
            return NetworkPartition(_ranks(parts[0]), _ranks(parts[1]), *_interval(*parts[2:]))
        case _:
            return Pause(int(parts[0]), *_interval(*parts[1:]))


def _interval(start: str | None, end: str | None) -> tuple[float, float]:
    return float(start or 0.0), float(end) if end else math.inf


def _ranks(ranks: str) -> frozenset[int]:
    """Returns the ranks of a list such as "0-2,5"."""
    found: set[int] = set()
    for part in ranks.split(","):
        first, *last = map(int, part.split("-"))
        if len(last) > 1 or (last and last[0] < first):
            raise LaunchError(f"ranks: {part} are no ranks: give numbers and ranges, as in 0-3,5")
        found.update(range(first, (last or [first])[-1] + 1))
    return frozenset(found)
