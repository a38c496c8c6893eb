"""Colours of steps: the hue shows the microbatch, the lightness the kind.

The hues repeat after `NUM_HUES` microbatches. They were chosen by a search that kept neighbours apart for normal sight
and for the three kinds of colour blindness (as simulated by Machado, Oliveira and Fernandes, 2009). The lightness of a
kind is nearly the same for every hue, so kinds stay apart in greyscale: forward is the lightest, then input gradient,
fused backward and weight gradient.
"""

from __future__ import annotations

from echelon.timeline.timeline import Kind

# From OKLCH (Ottosson, 2020): lightness F 0.88, I 0.755, B 0.615, W 0.45, a little different for each hue; hues of 87,
# 274, 1, 106, 304 and 176 degrees with chroma 0.076 to 0.131, less where sRGB has no such colour.
_COLORS: dict[Kind, tuple[str, ...]] = {
    "F": ("#e6c880", "#d1dafe", "#ffb1c7", "#ebe8a2", "#d8bbfe", "#8efde2"),
    "I": ("#bea059", "#a4b1e5", "#e47e9e", "#c2bf7b", "#b58de5", "#63d3b9"),
    "B": ("#92752d", "#7a86b7", "#b55474", "#969350", "#8a63b7", "#2ea68e"),
    "W": ("#5e4702", "#4c5684", "#7f2246", "#66621d", "#5a3383", "#06715e"),
}
_GREYS: dict[Kind, str] = {"F": "#d7d7d7", "I": "#afafaf", "B": "#848484", "W": "#555555"}

NUM_HUES = 6
"""Number of microbatches that have a colour of their own."""

KIND_NAMES: dict[Kind, str] = {
    "F": "forward",
    "I": "input gradient",
    "B": "backward",
    "W": "weight gradient",
}
"""Names of the kinds in a legend, the lightest first."""


def color(microbatch: int | None, kind: Kind) -> str:
    """Returns the colour of a step as "#rrggbb". Grey if the microbatch is None, which stands for any."""
    return _GREYS[kind] if microbatch is None else _COLORS[kind][microbatch % NUM_HUES]


def text_color(kind: Kind) -> str:
    """Returns the colour of readable text on a step of this kind: black or white, as "#rrggbb"."""
    return "#ffffff" if kind == "W" else "#000000"
