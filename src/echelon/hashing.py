"""Numbers from texts, equal on all ranks and in all versions. Pure."""

from __future__ import annotations

import hashlib


def stable_number(text: str) -> int:
    """Returns a number of 64 bits from a text. Texts that hardly differ have unrelated numbers."""
    # A run that is resumed with a later version must draw the same, so the hash is fixed.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
