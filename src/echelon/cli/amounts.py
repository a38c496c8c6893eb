"""Parsers of option values: costs (one for all stages, or one per stage between commas) and hosts of ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from echelon.errors import PlanError, ScheduleError
from echelon.pipeline.plan.cost import Amount, Costs
from echelon.timeline.timeline import Time

_COUNTS = re.compile(r"(\d+)x(\d+)")


def read_hosts(text: str, num_ranks: int | None) -> tuple[str, ...]:
    """Returns the host name of each rank, from "a,a,b,b" or from "2x2" (2 hosts of 2 ranks each).

    Raises:
        PlanError: the number of hosts is not `num_ranks`.
    """
    counts = _COUNTS.fullmatch(text.strip())
    count = int(counts[1]) * int(counts[2]) if counts else text.count(",") + 1
    if count != num_ranks:
        ranks = "no number of" if num_ranks is None else str(num_ranks)
        raise PlanError(f"--hosts {text} is for {count}, not for {ranks} ranks: give as a,a,b,b or 2x2, with -r 4")
    if counts:
        return tuple(str(number // int(counts[2])) for number in range(count))
    return tuple(name.strip() for name in text.split(","))


_LARGEST = 10**100
"""Above every real cost; sums of such values still fit a float."""


def one_number(option: str, text: str) -> Time:
    """Returns the number that an option was given. An int if it is whole, so that sums stay exact.

    Raises:
        ScheduleError: `text` is not a number from 0 to 1e100.
    """
    try:
        value = Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        raise ScheduleError(f"{option} {text}: not a number; give one, such as 1.5") from None
    if value > _LARGEST:
        raise ScheduleError(f"{option} {text[:20]}: above 1e100; give a smaller number, such as 1.5")
    if value < 0:
        raise ScheduleError(f"{option} {text}: below 0; give a number of at least 0, such as 1.5")
    return int(value) if value.denominator == 1 else float(value)


def costs(given: Mapping[str, str | None]) -> Costs:
    """Returns the costs given by options. Keys are the fields of `Costs`; None leaves a field at its default.

    Raises:
        ScheduleError: a value is not a cost.
    """
    amounts = {name: amount("--" + name.replace("_", "-"), text) for name, text in given.items() if text is not None}
    return Costs(**amounts)


def amount(option: str, text: str) -> Amount:
    """Returns one number, or a tuple of the numbers between commas.

    Raises:
        ScheduleError: a part is not a number of at least 0.
    """
    values = tuple(one_number(option, part) for part in text.split(","))
    return values if len(values) > 1 else values[0]
