"""ZB-V, V-Half and V-Min: their memory and their bubbles."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from echelon.pipeline.plan.cost import Costs
from echelon.pipeline.schedules import build

EQUAL = Costs(1, 1, 1, transfer=0)
NAMES = ("zb-v", "v-half", "v-min")
PEAKS = {
    "zb-v": lambda ranks: ranks,
    "v-half": lambda ranks: (ranks + 2) // 2,
    "v-min": lambda ranks: (ranks + 4) // 3,
}

with (Path(__file__).parent / "published.csv").open(newline="") as file:
    ROWS = [row for row in csv.DictReader(file) if row["bubble_zb_v"]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_size_is_valid_and_keeps_its_memory(name, ranks):
    for microbatches in (*range(1, 2 * ranks + 2), 32):
        build(name, ranks, microbatches).check(memory_limit=2 * PEAKS[name](ranks))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", range(2, 17))
def test_peaks_are_those_of_the_papers(name, ranks):
    timeline = build(name, ranks, 2 * ranks).simulate(EQUAL)
    assert max(timeline.peak_activations) == 2 * PEAKS[name](ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("times", [2, 3])
def test_zb_v_has_no_bubble_where_all_take_equally_long(ranks, times):
    assert build("zb-v", ranks, times * ranks).simulate(EQUAL).bubble_rate == 0


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['microbatches']}")
def test_zb_v_reaches_its_published_rates(row):
    times = (float(row[name]) for name in ("forward", "backward_input", "backward_weight", "transfer"))
    timeline = build("zb-v", int(row["ranks"]), int(row["microbatches"])).simulate(Costs(*times))
    assert timeline.bubble_rate <= float(row["bubble_zb_v"]) + 0.0001


@pytest.mark.parametrize(
    ("name", "ranks", "bubble"), [("v-half", 4, 5), ("v-half", 8, 17), ("v-min", 4, 11), ("v-min", 8, 27)]
)
def test_published_bubbles_of_v_half_and_v_min(name, ranks, bubble):
    for microbatches in (ranks, 2 * ranks, 5 * ranks):
        assert build(name, ranks, microbatches).simulate(EQUAL).span == 6 * microbatches + bubble


@pytest.mark.parametrize("ranks", range(2, 17))
def test_bubbles_in_general(ranks):
    half = build("v-half", ranks, 2 * ranks).simulate(EQUAL).span - 12 * ranks
    least = build("v-min", ranks, 2 * ranks).simulate(EQUAL).span - 12 * ranks
    assert half == (max(0, 3 * ranks - 7) if ranks % 2 == 0 else 3 * ranks - 4)
    assert least == (4 * ranks - 5 if ranks % 3 else 4 * ranks - 4)
