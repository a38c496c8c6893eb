"""Hatching of idle time: lines across a rectangle, so that its causes differ in greyscale too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from echelon.timeline.timeline import Cause

# matplotlib has hatches, but writes all their lines into an SVG, which makes it three times as large.
LINES: Mapping[Cause, tuple[float, float]] = {
    "warm_up": (0.0, 0.18),
    "other_ranks": (0.09, 0.0),
    "transfer": (0.0, 0.045),
    "overhead": (0.1, 0.1),
    "drain": (0.0, 0.18),
}
"""Inches between rising lines and between falling lines of a cause. 0: there are none."""


class Stroke(NamedTuple):
    """Line from one point to another."""

    left: float
    first: float
    right: float
    second: float


def strokes(cause: Cause, left: float, right: float, top: float, bottom: float) -> Iterator[Stroke]:
    """Yields the lines across a rectangle, in inches with y downwards."""
    height = bottom - top
    for distance, rises in zip(LINES[cause], (True, False), strict=True):
        if not distance:
            continue
        # Multiples of the distance, not of the rectangle's edge: neighbours then look like one area.
        for number in range(math.floor((left - height) / distance), math.ceil(right / distance)):
            start = number * distance
            first, last = max(left, start), min(right, start + height)
            if first < last:
                down, up = (bottom, -1) if rises else (top, 1)
                yield Stroke(first, down + up * (first - start), last, down + up * (last - start))
