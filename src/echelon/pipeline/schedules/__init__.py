"""The named pipeline schedules, one file each, and the search for one made to measure.

To add one: write a function that takes num_ranks, num_microbatches (and num_chunks) and returns a `Schedule`.
docs/schedules.md shows one in 20 lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.pipeline.schedules.registry import build, names
from echelon.pipeline.search.engine import search

if TYPE_CHECKING:
    from echelon.pipeline.recommend import recommend

__all__ = ["build", "names", "recommend", "search"]


def __getattr__(name: str) -> object:
    # What compares the schedules needs them to be there first.
    if name != "recommend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from echelon.pipeline.recommend import recommend

    return recommend
