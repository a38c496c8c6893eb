"""Wording of timelines: titles, and times and memory with their units."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from itertools import groupby
from typing import NamedTuple

from echelon.timeline.palette import CAUSE_NAMES, ENDS
from echelon.timeline.timeline import Cause, MemoryUnit, Time, Timeline, Unit


def title(timeline: Timeline) -> str:
    """Returns the first line of a picture's title, such as "1f1b, simulated"."""
    return ", ".join(filter(None, (timeline.name, _origin(timeline)))) or "timeline"


def summary(timeline: Timeline) -> str:
    """Returns the origin and the figures of a timeline, such as "simulated: makespan 24, bubble rate 20.0 %"."""
    return ": ".join(filter(None, (_origin(timeline), figures(timeline))))


def _origin(timeline: Timeline) -> str:
    return {True: "measured", False: "simulated", None: ""}[is_measured(timeline)]


def figures(timeline: Timeline) -> str:
    """Returns the figures of a timeline, such as "makespan 24, bubble rate 20.0 %, peak activations 4 3 2 1".

    Peaks are in the unit of the memory below, in bytes if that is known.
    """
    parts = [f"makespan {time_text(timeline.makespan, timeline.unit)}"]
    # A forecast knows the bubble of each device, which is another figure than that of the busiest rank.
    share = timeline.bubble_share
    name, rate = ("bubble rate", float(timeline.bubble_rate)) if share is None else ("bubble", share)
    if not math.isnan(rate):
        parts.append(f"{name} {rate_text(rate)}")
    if timeline.peak_activations:
        parts.append(f"peak activations {_peaks(timeline)}")
    return ", ".join(parts)


def rate_text(rate: float | None) -> str:
    """Returns a rate in percent, such as "20.0 %"; "-" for None."""
    return "-" if rate is None else f"{100 * rate:.1f} %"


def number(value: Time) -> str:
    """Returns a number with at most 4 digits."""
    # Enough to compare two runs, and short enough for a table.
    return f"{float(value):.4g}"


class Scale(NamedTuple):
    """Unit for people: its name, and how many of it are one of the timeline's."""

    name: str
    factor: float


def time_scale(longest: Time, unit: Unit) -> Scale:
    """Returns the unit in which times up to `longest` are short numbers."""
    if unit != "s":
        return Scale("", 1.0)
    return next(
        (Scale(name, factor) for name, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if longest * factor >= 1),
        Scale("ns", 1e9),
    )


def time_text(value: Time, unit: Unit) -> str:
    """Returns a time with its unit, such as "12.5 ms"; a plain number in the units of a plan."""
    name, factor = time_scale(value, unit)
    return f"{number(float(value) * factor)} {name}".strip()


def axis_words(timeline: Timeline, scale: Scale) -> str:
    """Returns the title of the time axis."""
    if scale.name:
        return f"time ({scale.name})"
    return "time (units of the plan)" if timeline.name and not is_measured(timeline) else "time"


_OF_COSTS = "units of Costs.activation"
_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def memory_text(amount: Time, unit: MemoryUnit) -> str:
    """Returns an amount of memory: "1.5 GiB" for bytes, a plain number otherwise."""
    if unit != "B":
        return number(amount)
    size, name = next((pair for pair in _BYTES if amount >= pair[0]), (1, "B"))
    return f"{float(amount) / size:.3g} {name}"


def is_measured(timeline: Timeline) -> bool | None:
    """Returns whether a timeline was recorded. None if it has no transfers, which alone would show it."""
    # Only a simulation knows when a transfer arrived.
    return next((transfer.end is None for transfer in timeline.transfers), None)


def _peaks(timeline: Timeline) -> str:
    if timeline.memory_unit != "B":
        return _per_rank(timeline.peak_activations) + ("" if timeline.memory_unit else f" ({_OF_COSTS})")
    if not timeline.memory:
        return _per_rank(timeline.peak_activations, "B")
    # A measured run counts its activations as a plan does, and holds their bytes.
    return _per_rank(tuple(max((level.amount for level in held), default=0) for held in timeline.memory), "B")


def _per_rank(values: tuple[Time, ...], unit: MemoryUnit = "") -> str:
    texts = [memory_text(value, unit) for value in values]
    # More than 8 numbers would not fit a title: then the largest and the smallest.
    if len(values) > 8:
        most, least = values.index(max(values)), values.index(min(values))
        return f"{texts[most]} (rank {most}) to {texts[least]}"
    if len(list(groupby(values))) == 1:
        return texts[0] + (" on every rank" if len(values) > 1 else "")
    return " ".join(texts) if unit != "B" else ", ".join(texts)


def cause_words(causes: Collection[Cause]) -> Iterator[tuple[Cause, str]]:
    """Yields the causes of idle time with their names for a legend."""
    # Both ends of a row look alike, and need one entry.
    ends = [cause for cause in ENDS if cause in causes]
    if ends:
        yield ends[0], " and ".join(CAUSE_NAMES[cause] for cause in ends)
    yield from ((cause, name) for cause, name in CAUSE_NAMES.items() if cause in causes and cause not in ENDS)


def chunk_words(num_chunks: int) -> str:
    """Returns the entry of a legend for the marks of chunks."""
    return "second chunk" if num_chunks == 2 else f"chunk 1 to {num_chunks - 1}: as many lines, at most 3"


def memory_words(timeline: Timeline) -> str:
    """Returns the entry of a legend for the memory that ranks hold."""
    unit = {"B": "memory", "activations": "activations", "": f"activations ({_OF_COSTS})"}[timeline.memory_unit]
    return f"{unit} held, peak at the right"
