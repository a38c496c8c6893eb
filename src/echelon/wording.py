"""How numbers of things are put into words."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """Returns "1 rank" or "2 ranks"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
