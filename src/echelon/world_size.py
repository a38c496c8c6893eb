"""The limits on how many ranks a world and a host may have. A number above them is a slip, or a wrong variable."""

from __future__ import annotations

from echelon.errors import InvalidWorldSize

MAX_WORLD_SIZE = 65_536
"""Ranks of one world."""
MAX_LOCAL_WORLD_SIZE = 4_096
"""Ranks of one world on one host."""


def check_world_size(world_size: int, name: str = "world_size", maximum: int = MAX_WORLD_SIZE) -> None:
    """Raises InvalidWorldSize unless `world_size`, which was given as `name`, is a number of ranks up to `maximum`."""
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise InvalidWorldSize(f"{name}={world_size!r}: a world has at least 1 rank: give 1 or more")
    if world_size > maximum:
        where = "a world" if maximum == MAX_WORLD_SIZE else "one host"
        raise InvalidWorldSize(
            f"{name}={world_size}: {where} has at most {maximum:,} ranks: give the number of ranks that there are"
        )
