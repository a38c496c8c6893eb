"""Slurm's way to write many names of hosts in a short text: "gpu[01-03,7],login" is gpu01 gpu02 gpu03 gpu7 login."""

from __future__ import annotations

import itertools
import re

from echelon.errors import LaunchError

MAX_HOSTS = 1 << 17
"""More than this are a mistake, and would take long to write out."""
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand(text: str) -> tuple[str, ...]:
    """Returns all names that `text` stands for, in its order.

    Raises:
        LaunchError: it is no such list, or stands for more than 2^17 hosts.
    """
    hosts: list[str] = []
    position = 0
    while position <= len(text):
        parts: list[list[str]] = []
        while found := _PART.match(text, position):
            bracket, plain = found.groups()
            parts.append([plain] if plain is not None else _numbers(bracket, text))
            position = found.end()
        count = len(hosts) + _product(parts)
        if not parts or (position < len(text) and text[position] != ","):
            raise LaunchError(f"{text!r} is not a list of hosts such as 'gpu[01-04],login': correct it")
        if count > MAX_HOSTS:
            raise LaunchError(f"{text!r} stands for more than {MAX_HOSTS} hosts: correct it")
        hosts += ("".join(names) for names in itertools.product(*parts))
        position += 1
    return tuple(hosts)


def _numbers(text: str, whole: str) -> list[str]:
    """Returns the numbers of "01-03,7", each as wide as it is written."""
    numbers: list[str] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise LaunchError(f"{whole!r}: [{text}] is not a list of numbers such as [01-04,7]: correct it")
        first, last = found.group(1), found.group(2) or found.group(1)
        if not 0 <= int(last) - int(first) < MAX_HOSTS:
            raise LaunchError(f"{whole!r}: {part} is not a range of up to {MAX_HOSTS} numbers: correct it")
        numbers += (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
    return numbers


def _product(parts: list[list[str]]) -> int:
    count = 1
    for names in parts:
        count *= len(names)
    return count
