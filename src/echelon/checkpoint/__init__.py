"""Checkpoints that are atomic and fit any layout.

`Store` is a folder of them. Its names are imported on first use: the process that writes in the background starts with
this package, and torch takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from echelon.arguments import no_attribute

if TYPE_CHECKING:
    from echelon.checkpoint.objects.encoding import PerRank
    from echelon.checkpoint.ranks.saving import Handle
    from echelon.checkpoint.store import Store

_WHERE = {
    "Handle": "echelon.checkpoint.ranks.saving",
    "PerRank": "echelon.checkpoint.objects.encoding",
    "Store": "echelon.checkpoint.store",
}

__all__ = ["Handle", "PerRank", "Store"]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        meant = dict.fromkeys(("save", "load", "async_save"), " make a store first: echelon.checkpoint.Store(folder)")
        # Python probes a module for names such as __path__.
        raise no_attribute(f"module {__name__!r}", name, () if name.startswith("__") else __all__, meant)
    value: object = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value  # the next access does not come here
    return value
