"""How numbers of things are put into words."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """Returns "1 rank" or "2 ranks", "1 microbatch" or "2 microbatches"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('ch') else 's'}"
