"""Colours stay apart, for colour-blind readers too, and text on them can be read."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from echelon.errors import InvalidArgument
from echelon.timeline.palette import (
    CAUSE_NAMES,
    COLORS,
    LINES,
    NAMES,
    THEMES,
    contrast,
    text_color,
    theme_named,
    tone_of,
)

# Of linear RGB; Machado, Oliveira and Fernandes, 2009, severity 1.
SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
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

PIPELINE = ("F", "I", "B", "W")
# Kinds that occur in one picture: a pipeline with its messages, a foreseen step, and a simulated program.
TOGETHER = {
    "messages of a pipeline": (*PIPELINE, "send", "receive", "communication"),
    "phases": ("F", "B", "recompute", "optimizer"),
    "a program": ("compute", "send", "receive", "communication", "all_gather", "reduce_scatter"),
    "exposed": ("exposed", "send", "receive", "communication", "all_gather", "reduce_scatter"),
}


def perceived(text: str, sight: str) -> np.ndarray:
    """In OKLab, where distances are about those that people see; 0.02 is just noticeable."""
    encoded = np.array([int(text[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    return TO_LAB @ np.cbrt(TO_LMS @ np.clip(np.array(SIGHT[sight]) @ linear, 0, 1))


def smallest_distance(tones, sight):
    seen = [perceived(COLORS[tone], sight) for tone in tones]
    return min(np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2))


@pytest.mark.parametrize("sight", SIGHT)
def test_kinds_stay_apart(sight):
    assert smallest_distance(PIPELINE, sight) > 0.18
    for name, tones in TOGETHER.items():
        assert smallest_distance(tones, sight) > 0.085, name


def test_kinds_of_a_pipeline_differ_in_print():
    grey = sorted(contrast(COLORS[tone], "#000000") ** (1 / 3) for tone in PIPELINE)
    assert min(lighter - darker for darker, lighter in itertools.pairwise(grey)) > 0.2


@pytest.mark.parametrize("tone", COLORS)
def test_text_on_a_box_can_be_read(tone):
    assert contrast(text_color(COLORS[tone]), COLORS[tone]) >= 4.5, "WCAG asks for 4.5"
    assert tone in NAMES


@pytest.mark.parametrize("theme", THEMES)
def test_causes_of_idle_time_stay_apart(theme):
    colors = THEMES[theme]
    for cause, fill in colors.idle.items():
        assert contrast(colors.hatch[cause], colors.page) >= 3, "WCAG asks for 3 between a line and its background"
        assert contrast(colors.hatch[cause], fill) >= 3
    looks = {(LINES[cause], colors.idle[cause], colors.hatch[cause]) for cause in ("warm_up", "drain")}
    assert len(looks) == 1, "the legend has one entry for both"
    causes = [cause for cause in CAUSE_NAMES if cause != "drain"]
    fills = [colors.page, *(colors.idle[cause] for cause in causes)]
    seen = [perceived(fill, "normal") for fill in fills]
    assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)) > 0.035
    for one, other in itertools.combinations([LINES[cause] for cause in causes], 2):
        directions = [tuple(distance > 0 for distance in distances) for distances in (one, other)]
        dense, sparse = sorted(max(distances) for distances in (one, other))
        assert any(one)
        assert any(other)
        assert directions[0] != directions[1] or sparse >= 3 * dense, "for colour-blind readers and print"


@pytest.mark.parametrize("theme", THEMES)
def test_text_lines_and_boxes_stand_out_from_the_page(theme):
    colors = THEMES[theme]
    assert contrast(colors.ink, colors.page) >= 7
    assert contrast(colors.faint, colors.page) >= 4.5
    # WCAG asks for 3 between a line and its background, which the critical path needs on the page and on waits.
    assert min(contrast(colors.ink, fill) for fill in colors.idle.values()) >= 3
    assert set(colors.idle) == set(CAUSE_NAMES)
    lightest = min(COLORS.values(), key=lambda fill: contrast(fill, colors.page))
    assert all(contrast(lightest, colors.page) > contrast(fill, colors.page) for fill in colors.idle.values())


def test_contrast_is_that_of_wcag():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize(
    ("name", "tone"),
    [
        ("all_gather of rows of float32[], #3 by ring", "all_gather"),
        ("all_gather_into_tensor", "all_gather"),
        ("reduce_scatter(sum) of float32[4000]", "reduce_scatter"),
        ("all_reduce dp", "communication"),
        ("exchange and reduce [0>1]", "communication"),
        ("send pp", "send"),
        ("receive", "receive"),
        ("backward", "B"),
        ("optimizer", "optimizer"),
        ("reader", "compute"),
        ("forwarded", "compute"),
        ("", "compute"),
    ],
)
def test_the_first_word_is_the_kind(name, tone):
    assert tone_of(name) == tone


def test_an_unknown_theme():
    with pytest.raises(InvalidArgument, match="theme='blue': give 'light' or 'dark'"):
        theme_named("blue")
