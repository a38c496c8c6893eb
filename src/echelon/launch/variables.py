"""Reads numbers out of environment variables, and says under which name a wrong one was set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from echelon.errors import InvalidRank, InvalidWorldSize, LaunchError
from echelon.world_size import MAX_WORLD_SIZE, check_world_size


@dataclass(frozen=True)
class Variables:
    """Variables by the names that torchrun uses, whoever set them.

    values: the text of each by that name; empty counts as not set. aliases: the name under which it was really set,
    where that is another one; errors use it.
    """

    values: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Returns what `name` is set to; an empty text if it is not."""
        return self.values.get(name, "")

    def world_size(self, name: str, default: int | None = None, maximum: int = MAX_WORLD_SIZE) -> int:
        """Returns a number of ranks. Raises InvalidWorldSize if it is none, or above `maximum`."""
        text = self.text(name)
        if not text and default is not None:
            return default
        value = parse(text)
        if value is None or value < 1 or (value > maximum and value <= MAX_WORLD_SIZE):
            upper = "or more" if maximum == MAX_WORLD_SIZE else f"to {maximum}"
            raise InvalidWorldSize(f"{self.alias(name)}={text[:40]!r}: set it to a number of ranks, 1 {upper}")
        check_world_size(value, self.alias(name))
        return value

    def rank(self, name: str, world_size: int, default: int | None = None) -> int:
        """Returns a rank. Raises InvalidRank if it is none of `world_size`."""
        text = self.text(name)
        if not text and default is not None:
            return default
        value = parse(text)
        if value is None:
            raise InvalidRank(text, world_size, self.alias(name))
        if not 0 <= value < world_size:
            raise InvalidRank(value, world_size, self.alias(name))
        return value

    def number(
        self, name: str, what: str, *, default: int | None = None, minimum: int = 0, maximum: int | None = None
    ) -> int:
        """Returns a whole number. Raises LaunchError that says it is not `what` if it is none, or out of range."""
        text = self.text(name)
        if not text and default is not None:
            return default
        value = parse(text)
        if value is None or value < minimum or (maximum is not None and value > maximum):
            raise LaunchError(f"{self.alias(name)}={text!r} is not {what}: correct it")
        return value

    def alias(self, name: str) -> str:
        """Returns the name under which `name` was really set."""
        return self.aliases.get(name, name)


def parse(text: str) -> int | None:
    """Returns the whole number that a text is, None if it is none."""
    try:
        return int(text)
    except ValueError:
        return None
