"""Which ranks share a host, on the command line: a name for each rank, or how many hosts have how many."""

from __future__ import annotations

import re

from echelon.errors import PlanError

_COUNTS = re.compile(r"(\d+)x(\d+)")


def read_hosts(text: str, num_ranks: int | None) -> tuple[str, ...]:
    """Reads "a,a,b,b", the host of each rank, or "2x2", two hosts of two ranks.

    Raises:
        PlanError: it is not one host for each of `num_ranks`.
    """
    counts = _COUNTS.fullmatch(text.strip())
    count = int(counts[1]) * int(counts[2]) if counts else text.count(",") + 1
    if count != num_ranks:
        ranks = "no number of" if num_ranks is None else str(num_ranks)
        raise PlanError(f"--hosts {text} is for {count}, not for {ranks} ranks: give as a,a,b,b or 2x2, with -r 4")
    if counts:
        return tuple(str(number // int(counts[2])) for number in range(count))
    return tuple(name.strip() for name in text.split(","))
