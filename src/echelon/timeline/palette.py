"""Colours of pictures: a hue for each kind of step, shades and hatching of idle time, and the themes around them.

The colours were found by a search in OKLCH (Ottosson, 2020) under four rules, which tests/timeline/test_palette.py
checks:

- Kinds that occur in one picture stay apart, for normal sight and for the three kinds of colour blindness (as simulated
  by Machado, Oliveira and Fernandes, 2009).
- The four kinds of a pipeline differ most, since they are narrow neighbours. They differ in lightness too, for print.
- Text on a box has a contrast of at least 4.5 (WCAG 2.2, level AA).
- One colour serves the light and the dark theme, so that the same picture in both has the same legend.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from echelon.errors import InvalidArgument
from echelon.timeline.timeline import Cause

Tone: TypeAlias = Literal[
    "F",
    "I",
    "W",
    "B",
    "recompute",
    "optimizer",
    "compute",
    "send",
    "receive",
    "all_gather",
    "reduce_scatter",
    "communication",
    "exposed",
]
"""Kind of a box. The first four are those of actions."""

COLORS: Mapping[Tone, str] = {
    "F": "#8bb9e9",
    "I": "#f8cf5b",
    "W": "#14583d",
    "B": "#d17c54",
    "recompute": "#d3dabd",
    "optimizer": "#6a549a",
    "compute": "#8792a8",
    "send": "#abe8ed",
    "receive": "#4177b3",
    "all_gather": "#fa9db2",
    "reduce_scatter": "#daaeef",
    "communication": "#985780",
    "exposed": "#ba2d1c",
}

NAMES: Mapping[Tone, str] = {
    "F": "forward",
    "I": "input gradient",
    "B": "backward",
    "W": "weight gradient",
    "recompute": "recompute",
    "optimizer": "optimizer",
    "compute": "compute",
    "send": "send",
    "receive": "receive",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "communication": "communication",
    "exposed": "exposed communication",
}
"""Names of the kinds, in the order of a legend."""

CAUSE_NAMES: Mapping[Cause, str] = {
    "warm_up": "warm-up",
    "other_ranks": "waits for a rank",
    "transfer": "waits for a transfer",
    "overhead": "idle for an unknown cause",
    "drain": "drain",
}
"""Names of the causes of idle time in a legend."""

ENDS: tuple[Cause, ...] = ("warm_up", "drain")
"""Causes of idle time at the ends of a row, before the first and after the last step."""

_INK, _PAPER = "#14171b", "#ffffff"


@dataclass(frozen=True)
class Theme:
    """Colours around the boxes.

    Args:
        page: Background.
        ink: Text and the critical path.
        faint: Axes and less important text.
        line: Thin separators.
        memory: Area of held memory.
        idle: Background of idle time, by its cause.
        hatch: Lines on the background of idle time, by its cause.
    """

    page: str
    ink: str
    faint: str
    line: str
    memory: str
    idle: Mapping[Cause, str]
    hatch: Mapping[Cause, str]


THEMES: Mapping[str, Theme] = {
    "light": Theme(
        page="#ffffff",
        ink="#1b1f24",
        faint="#5b6470",
        line="#dfe3e8",
        memory="#b6bdc8",
        idle={
            "warm_up": "#f0f2f5",
            "other_ranks": "#dbdfe6",
            "transfer": "#c4f0f5",
            "overhead": "#f9d6cf",
            "drain": "#f0f2f5",
        },
        hatch={
            "warm_up": "#818a97",
            "other_ranks": "#6f7987",
            "transfer": "#2b7f8c",
            "overhead": "#b5523f",
            "drain": "#818a97",
        },
    ),
    "dark": Theme(
        page="#1a1e23",
        ink="#e8eaed",
        faint="#9aa4b0",
        line="#39414a",
        memory="#59636f",
        idle={
            "warm_up": "#242a31",
            "other_ranks": "#363e48",
            "transfer": "#1f4f59",
            "overhead": "#5a2f28",
            "drain": "#242a31",
        },
        hatch={
            "warm_up": "#6c7784",
            "other_ranks": "#8d98a5",
            "transfer": "#6fb7c4",
            "overhead": "#d98a7b",
            "drain": "#6c7784",
        },
    ),
}


def theme_named(name: object) -> Theme:
    """Returns a theme.

    Raises:
        InvalidArgument: there is none of that name.
    """
    if not isinstance(name, str) or name not in THEMES:
        raise InvalidArgument(f"theme={name!r}: give 'light' or 'dark'")
    return THEMES[name]


_FIRST_WORDS: Mapping[str, Tone] = {
    "forward": "F",
    "backward": "B",
    "recompute": "recompute",
    "optimizer": "optimizer",
    "send": "send",
    "isend": "send",
    "receive": "receive",
    "recv": "receive",
    "irecv": "receive",
    "exposed": "exposed",
}
_COLLECTIVES = ("all_reduce", "all_to_all", "broadcast", "barrier", "reduce", "gather", "scatter", "exchange", "scan")


def tone_of(name: str) -> Tone:
    """Returns the kind of a step that is no action, by the first word of its name. Most names are computations."""
    word = name.split(maxsplit=1)[0].lower() if name.strip() else ""
    if word in _FIRST_WORDS:
        return _FIRST_WORDS[word]
    # By their beginning: names go on, as in all_gather_object.
    if word.startswith("all_gather"):
        return "all_gather"
    if word.startswith("reduce_scatter"):
        return "reduce_scatter"
    return "communication" if word.startswith(_COLLECTIVES) else "compute"


def text_color(fill: str) -> str:
    """Returns the colour of text on a box of this colour: black or white, whichever has more contrast."""
    return max((_INK, _PAPER), key=lambda text: contrast(text, fill))


def contrast(one: str, other: str) -> float:
    """Returns the contrast of two colours "#rrggbb" as WCAG defines it, from 1 to 21."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(color: str) -> float:
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


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
