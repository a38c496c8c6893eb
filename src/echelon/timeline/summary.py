"""Summary of a timeline in one line: makespan, bubble rate and peak memory."""

from __future__ import annotations

from itertools import groupby

from echelon.timeline.timeline import Time, Timeline


def summary(timeline: Timeline) -> str:
    """Returns the title of a picture, such as "simulated: makespan 24, bubble rate 20.0 %"."""
    parts = [
        f"makespan {number(timeline.makespan)}",
        f"bubble rate {100 * float(timeline.bubble_rate):.1f} %",
    ]
    if timeline.peak_activations:
        parts.append(f"peak activations {_per_rank(timeline.peak_activations)}")
    origin = {True: "measured: ", False: "simulated: ", None: ""}[is_measured(timeline)]
    return origin + ", ".join(parts)


def number(value: Time) -> str:
    """Returns a number with at most 4 digits."""
    # Enough to compare two runs, and short enough for a table.
    return f"{float(value):.4g}"


def is_measured(timeline: Timeline) -> bool | None:
    """Returns whether a timeline was recorded. None if it has no transfers, which alone would show it."""
    # Only a simulation knows when a transfer arrived.
    return next((transfer.end is None for transfer in timeline.transfers), None)


def _per_rank(values: tuple[Time, ...]) -> str:
    # More than 8 numbers would not fit a title: then the largest and the smallest.
    if len(values) > 8:
        return f"{number(max(values))} (rank {values.index(max(values))}) to {number(min(values))}"
    if len(list(groupby(values))) == 1:
        return number(values[0]) + (" on every rank" if len(values) > 1 else "")
    return " ".join(map(number, values))
