"""The named pipeline schedules, one file each.

To add one: write a function that takes num_ranks, num_microbatches (and num_chunks) and returns a `Schedule`.
docs/schedules.md shows one in 20 lines.
"""

from __future__ import annotations

from echelon.pipeline.schedules.registry import build, names

__all__ = ["build", "names"]
