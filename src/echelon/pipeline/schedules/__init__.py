"""Named pipeline schedules, one file for each family, and the search for a schedule tailored to given costs.

To add one: write a function that takes num_ranks, num_microbatches (and num_chunks) and returns a `Schedule`.
docs/schedules.md shows one in 20 lines.

Pure.
"""

from __future__ import annotations

from echelon.pipeline.schedules.recommendation import recommend
from echelon.pipeline.schedules.registry import build, names
from echelon.pipeline.search.engine import search

__all__ = ["build", "names", "recommend", "search"]
