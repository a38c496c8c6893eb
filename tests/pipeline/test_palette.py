"""Colours stay apart, for colour-blind readers and in greyscale."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from echelon.timeline.palette import KIND_NAMES, NUM_HUES, color, text_color

# Of linear RGB; Machado, Oliveira and Fernandes, 2009, severity 1.
SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
LUMINANCE = np.array([0.2126, 0.7152, 0.0722])
TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def linear(text: str) -> np.ndarray:
    encoded = np.array([int(text[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def perceived(text: str, sight: str) -> np.ndarray:
    """In OKLab, where distances are about those that people see; 0.02 is just noticeable."""
    seen = np.clip(np.array(SIGHT[sight]) @ linear(text), 0, 1)
    return TO_LAB @ np.cbrt(TO_LMS @ seen)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("kind", KIND_NAMES)
def test_all_microbatches_of_a_kind_can_be_told_apart(kind, sight):
    seen = [perceived(color(microbatch, kind), sight) for microbatch in range(NUM_HUES)]
    assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)) > 0.04


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("kind", KIND_NAMES)
def test_neighbours_are_further_apart(kind, sight):
    seen = [perceived(color(microbatch, kind), sight) for microbatch in range(NUM_HUES + 1)]
    assert min(np.linalg.norm(one - other) for one, other in itertools.pairwise(seen)) > 0.07


def test_kinds_differ_in_lightness_whatever_the_microbatch():
    lightness = [
        [np.cbrt(LUMINANCE @ linear(color(microbatch, kind))) for microbatch in [None, *range(NUM_HUES)]]
        for kind in KIND_NAMES
    ]
    for lighter, darker in itertools.pairwise(lightness):
        assert min(lighter) - max(darker) > 0.02


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_text_can_be_read(kind):
    for microbatch in [None, *range(NUM_HUES)]:
        light, dark = sorted(
            (LUMINANCE @ linear(text) for text in (color(microbatch, kind), text_color(kind))), reverse=True
        )
        assert (light + 0.05) / (dark + 0.05) > 4.4, "WCAG asks for 4.5"


def test_colours_repeat():
    assert color(0, "F") == color(NUM_HUES, "F") != color(1, "F")
    assert len(color(None, "F")) == 7


# Degrees, chroma, and the difference of the lightness from the kind's, in OKLCH (Ottosson, 2020).
HUES = (
    *((87, 0.097, -0.038), (274, 0.076, 0.014), (1, 0.130, -0.040)),
    *((106, 0.089, 0.036), (304, 0.131, -0.040), (176, 0.110, 0.040)),
)
LIGHTNESS = {"F": 0.88, "I": 0.755, "B": 0.615, "W": 0.45}


def oklch(lightness, chroma, degrees):
    """Returns the colour as text. Less chroma where sRGB has no such colour: clipping would shift the hue."""
    lab = [lightness, chroma * math.cos(math.radians(degrees)), chroma * math.sin(math.radians(degrees))]
    channels = np.linalg.inv(TO_LMS) @ (np.linalg.inv(TO_LAB) @ lab) ** 3
    if chroma > 0 and (channels.min() < 0 or channels.max() > 1):
        return oklch(lightness, chroma - 0.002, degrees)
    channels = np.clip(channels, 0, 1)
    encoded = np.where(channels <= 0.0031308, 12.92 * channels, 1.055 * channels ** (1 / 2.4) - 0.055)
    return "#" + "".join(f"{round(255 * value):02x}" for value in encoded)


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_colours_come_from_one_lightness_for_each_kind(kind):
    expected = [oklch(LIGHTNESS[kind] + lighter, chroma, degrees) for degrees, chroma, lighter in HUES]
    assert [color(microbatch, kind) for microbatch in range(NUM_HUES)] == expected
    assert color(None, kind) == oklch(LIGHTNESS[kind], 0, 0)
