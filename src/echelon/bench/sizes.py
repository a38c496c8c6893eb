"""Numbers of bytes as people write them."""

from __future__ import annotations

import re

from echelon.errors import LaunchError

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_LARGEST = 1 << 42
_MOST_SIZES = 1000


def read_size(option: str, text: str) -> int:
    """Reads a number of bytes, such as "8", "64K" or "1MiB"; the units are powers of 1024.

    Raises:
        LaunchError: it is none.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise LaunchError(f"{option} {text}: not a number of bytes; give one such as 8, 64K or 1M")
    size = int(found[1]) << _UNITS[found[2].upper()]
    if size > _LARGEST:
        raise LaunchError(f"{option} {text}: more than 4T bytes; give fewer")
    return size


def size_ladder(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """Returns the sizes from `smallest` to `largest`, each `factor` times the one before.

    Raises:
        LaunchError: there are none, or no end of them.
    """
    if not 1 <= smallest <= largest:
        raise LaunchError(f"--min {smallest} --max {largest}: give bytes from 1 on, the smallest first")
    if factor < 2:
        raise LaunchError(f"--factor {factor}: sizes would not grow; give 2 or more")
    sizes = [smallest]
    while sizes[-1] * factor <= largest and len(sizes) < _MOST_SIZES:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)
