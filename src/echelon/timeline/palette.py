"""Colours of steps: the hue shows the microbatch, the lightness the kind.

The hues repeat after `NUM_HUES` microbatches. They were chosen by a search that kept neighbours apart for normal sight
and for the three kinds of colour blindness (as simulated by Machado, Oliveira and Fernandes, 2009). The lightness of a
kind is nearly the same for every hue, so kinds stay apart in greyscale: forward is the lightest, then input gradient,
fused backward and weight gradient.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from echelon.timeline.timeline import Kind


class _Hue(NamedTuple):
    """Hue in the OKLCH colour space (Ottosson, 2020), and the difference of its lightness from the kind's."""

    degrees: float
    chroma: float
    lighter: float


_HUES = (
    _Hue(87, 0.097, -0.038),
    _Hue(274, 0.076, 0.014),
    _Hue(1, 0.130, -0.040),
    _Hue(106, 0.089, 0.036),
    _Hue(304, 0.131, -0.040),
    _Hue(176, 0.110, 0.040),
)
_GREY = _Hue(0, 0, 0)
_LIGHTNESS: dict[Kind, float] = {"F": 0.88, "I": 0.755, "B": 0.615, "W": 0.45}

NUM_HUES = len(_HUES)
"""Number of microbatches that have a colour of their own."""

KIND_NAMES: dict[Kind, str] = {
    "F": "forward",
    "I": "input gradient",
    "B": "backward",
    "W": "weight gradient",
}
"""Names of the kinds in a legend, the lightest first."""


@cache
def color(microbatch: int | None, kind: Kind) -> str:
    """Returns the colour of a step as "#rrggbb". Grey if the microbatch is None, which stands for any."""
    color_index = _GREY if microbatch is None else _HUES[microbatch % NUM_HUES]
    return _to_hex(_LIGHTNESS[kind] + color_index.lighter, color_index)


def text_color(kind: Kind) -> str:
    """Returns the colour of readable text on a step of this kind: black or white, as "#rrggbb"."""
    return "#000000" if _LIGHTNESS[kind] > 0.6 else "#ffffff"


def _to_hex(lightness: float, color_index: _Hue) -> str:
    chroma = color_index.chroma
    # Not every OKLCH colour exists in sRGB. Clipping the channels would shift the hue, less chroma keeps it.
    while True:
        channels = _to_linear(lightness, chroma, math.radians(color_index.degrees))
        if chroma <= 0 or (min(channels) >= 0 and max(channels) <= 1):
            return "#" + "".join(f"{_to_byte(channel):02x}" for channel in channels)
        chroma -= 0.002


def _to_linear(lightness: float, chroma: float, angle: float) -> tuple[float, float, float]:
    # Ottosson's matrices: OKLCH to cone responses, then to linear sRGB.
    a, b = chroma * math.cos(angle), chroma * math.sin(angle)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )


def _to_byte(linear: float) -> int:
    linear = min(max(linear, 0.0), 1.0)
    # Transfer function of sRGB (IEC 61966-2-1).
    encoded = 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055
    return round(255 * encoded)
