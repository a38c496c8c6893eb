"""The report of a foreseen step, as text of 80 columns and as JSON."""

import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.foresight.play.devices import DEVICES
from echelon.foresight.play.player import play
from echelon.foresight.report import ACCURACY, WIDTH, Report
from tests.helpers.traces import LINKS, PLAIN, Step

GIB = 1 << 30


@pytest.fixture
def step():
    step = Step(groups=((0, 1),)).kernel(1, flops=400).collective(1, 40).allocate(1, GIB // 2)
    return step.allocate(2, GIB // 4, "gradients").wait(1).kernel(1, phase="recompute", flops=200)


def report(step, device=PLAIN, **options):
    return Report(play({0: step.trace()}, [0] * 4, device, LINKS), **options)


def test_the_text_has_time_rates_exposed_lines_and_memory(step):
    text = str(report(step, tokens=400, title="train.py", problems=["rank 3 is full"], assumptions=["loss 1.0"]))
    assert text.startswith("train.py: 4 x plain on 2 hosts, 1 role recorded\n")
    for line in (
        "step                   4.00 s",
        "tokens per second      100",
        "exposed communication  50.0%",
        "train.py:2                g0  2.00 s  50.0%",
        "activations                   0.50",
        "reserved                      0.75",
        "fits into                     1.00",
        "- rank 3 is full",
        "- loss 1.0",
        "not compared with published runs",
    ):
        assert line in text, text


def test_the_text_fits_80_columns(step):
    step.places = [f"/home/somebody/projects/{'long' * 20}/train.py:{index}" for index in range(9)]
    assert max(map(len, str(report(step, problems=["word " * 60])).splitlines())) <= WIDTH


def test_a_step_that_does_not_fit_says_so(step):
    small = report(step, replace(PLAIN, memory_bytes=GIB // 2))
    assert not small.fits
    assert "DOES NOT FIT into" in str(small)


def test_a_known_device_names_its_accuracy(step):
    known = report(step, DEVICES["h100"])
    assert f"on {ACCURACY['h100'].num_rows} published" in " ".join(str(known).split())
    assert "+-" in str(known)


def test_the_figures_are_json(step):
    figures = json.loads(json.dumps(report(step, tokens=400).to_json()))
    assert figures["step_seconds"] == 4
    assert figures["tokens_per_second"] == 100
    assert figures["mfu"] == pytest.approx(400 / (4 * 1000))
    assert figures["roles"] == {"0": 4}
    assert figures["exposed"] == [{"group": "g0", "place": "train.py:2", "seconds": 2}]
    assert figures["memory"]["kinds"] == {"activations": GIB // 2, "gradients": GIB // 4}
    assert figures["memory"]["fits"] is True


BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "foresee"
TITLES = {"h100": "H100 80 GB", "h100-500w": "H100 96 GB, HBM2e, 500 W", "a100": "A100 80 GB", "a100-40g": "A100 40 GB"}


def errors_of(gpu):
    """Returns the errors of the benchmark's rows that were not fitted, sorted."""
    part = re.search(rf"^## {re.escape(gpu)}$(.*?)(?=^## |\Z)", (BENCHMARK / "rows.md").read_text(), re.M | re.S)
    cells = [line.split(" | ")[6] for line in part[1].splitlines() if line.startswith("| ") and "%" in line]
    return sorted(abs(float(cell.rstrip("%"))) / 100 for cell in cells[1:] if "fit" not in cell)


@pytest.mark.parametrize("gpu", ACCURACY)
def test_the_accuracy_is_that_of_the_benchmark(gpu):
    accuracy, errors = ACCURACY[gpu], errors_of(gpu)
    found = (len(errors), statistics.median(errors), errors[math.ceil(0.9 * len(errors)) - 1])
    assert accuracy[:3] == (found[0], pytest.approx(found[1], abs=6e-4), pytest.approx(found[2], abs=6e-4))
    row = f"| {TITLES[gpu]} | {{}} | {accuracy.num_rows} | {accuracy.median:.1%} |".replace("%", " %")
    head, _, rest = row.partition("{}")
    (line,) = [each for each in (BENCHMARK / "README.md").read_text().splitlines() if each.startswith(head)]
    assert rest in line
    assert f"{100 * accuracy.largest_of_nine_in_ten:.1f} %" in line
