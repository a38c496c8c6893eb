"""The HTML file of a foreseen step: complete, escaped, small, and in need of nothing else."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from echelon.foresight.page.lanes import Block, joined, lanes_of
from echelon.foresight.play.devices import DEVICES
from echelon.foresight.play.player import play
from echelon.foresight.run import Foreseen
from tests.helpers.browser import browser
from tests.helpers.traces import LINKS, PLAIN, Step

MIB = 1 << 20
HOSTILE = "</title><script>alert(1)</script>\"' onload=x \udcff$title"
VOID = {"meta", "input"}


class Page(HTMLParser):
    """Checks that tags are closed, and keeps the elements and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)


def data_of(page):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def seen_of(*steps, device=PLAIN, assumption=""):
    traces = {step.rank: replace(step.trace(), assumptions=(assumption,) * bool(assumption)) for step in steps}
    classes = tuple(max(rank for rank in traces if rank <= each) for each in range(4))
    return Foreseen(play(traces, classes, device, LINKS), traces, classes, (), "string")


def written(seen, tmp_path, **options):
    path = tmp_path / "report.html"
    seen.to_html(path, **options)
    text = path.read_text("utf-8")
    return text, Page(text)


@pytest.fixture
def step():
    step = Step().kernel(1, name="mm").collective(1, 40).allocate(1, 512 * MIB).allocate(2, 256 * MIB, "gradients")
    return step.wait(1).kernel(1, phase="backward")


def test_a_page_has_figures_lanes_memory_and_lines(step, tmp_path):
    seen = seen_of(step, assumption="loss is 1 at train.py:9")
    text_of_page, page = written(seen, tmp_path, tokens=400, title="train.py")
    text = "\n".join(page.texts)
    for part in (
        "train.py",
        "A step on 4 x plain, 2 hosts, string: foreseen from 1 recorded role",
        "4.00 s",
        "100",  # tokens per second
        "50.0%",
        "represents 4 ranks",
        "forward, 1.00 s: mm at train.py:1",
        "all_gather, 2.00 s: 0.0 MiB of float32 by ring at train.py:2",
        "exposed, 2.00 s: all_gather of",
        "of 1.0 GiB",
        "limit, 1.0 GiB",
        "activations of an unknown line",
        "loss is 1 at train.py:9",
        "Not compared with published runs",
        "jitter",
    ):
        assert part in text
    rows = data_of(text_of_page)["panels"][0]["rows"]
    assert [row["title"] for row in rows] == ["compute", "g0", "exposed"]
    assert rows[0]["head"] == "rank 0: represents 4 ranks, 4.00 s"
    assert [len(row["parts"]) // 3 for row in rows] == [2, 1, 1]
    assert {"forward", "backward", "all-gather", "exposed communication"} <= set(page.texts)


def test_a_page_needs_no_network_and_runs_no_text_of_the_program(step, tmp_path):
    step.places = [HOSTILE] * len(step.places)
    seen = seen_of(step, assumption=HOSTILE)
    text, page = written(seen, tmp_path, title=HOSTILE)
    assert [tag for tag, _ in page.tags].count("script") == 2, "the data and the code"
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on") or name == "src"]
    assert not re.search(r"https?:|url\(|@import|<link| src=", text)
    assert "default-src 'none'" in text
    escaped = text.count("&lt;script&gt;alert(1)") + text.count("\\u003cscript\\u003ealert(1)")
    assert text.count("alert(1)") == escaped


def test_many_kernels_and_roles_stay_below_a_megabyte(tmp_path):
    steps = []
    for rank in range(4):
        step = Step(rank, groups=((0, 1), (2, 3)))
        for index in range(2000):
            step.allocate(index + 1, MIB)  # too much in the end
            step.places = [HOSTILE * 9] * index
            step.kernel(1 + index % 3, stream=index % 2, phase=("forward", "backward", "recompute")[index % 3])
        steps.append(step)
    text, page = written(seen_of(*steps), tmp_path)
    assert any("(3 other roles do not fit either)" in text for text in page.texts)
    assert len(text) < 1_000_000
    rows = data_of(text)["panels"][0]["rows"]
    assert sum(len(row["boxes"]) // row["size"] for row in rows) > 2000  # not joined beyond recognition


def test_a_step_that_does_not_fit_says_so_at_the_top(step, tmp_path):
    _, page = written(seen_of(step, device=replace(DEVICES["a100"], memory_bytes=MIB)), tmp_path)
    text = "\n".join(page.texts)
    assert "rank 0 needs at least 0.8 GiB, an a100 has 0.0" in text
    assert text.index("does not fit") < text.index("memory needed") < text.index("Problems") < text.index("Timeline")


def test_a_step_that_fits_narrowly_says_so_at_the_top(step, tmp_path):
    _, page = written(seen_of(step), tmp_path)
    assert "fits narrowly" in page.texts
    (reason,) = [text for text in page.texts if text.startswith("Fits narrowly: rank 0 has 0.2 GiB left")]
    assert page.texts.index(reason) < page.texts.index("Timeline")
    _, page = written(seen_of(step, device=replace(PLAIN, memory_bytes=4 << 30)), tmp_path)
    assert "fits" in page.texts
    assert not any("narrowly" in text for text in page.texts)


def block(start, end, hue="forward", module="layers.0"):
    return Block(start, end, hue, ((f"mm at {start}", end - start),), module, module)


def test_neighbours_of_one_hue_and_module_are_one_block():
    blocks = [
        block(0, 1),
        block(1, 3),
        block(3, 4, module="layers.1"),
        block(4, 5, "backward"),
        block(6, 7, "backward"),
    ]
    found = joined(blocks, 10)
    assert [(each.start, each.end) for each in found] == [(0, 3), (3, 4), (4, 5), (6, 7)]
    assert found[0].text == "forward layers.0, 3.00 s, 2 in a row, the longest 2.00 s: mm at 1"


@pytest.mark.parametrize("most", [1, 7, 100])
def test_joined_blocks_are_few_and_lose_nothing(most):
    blocks = [block(index, index + 0.5 + index % 2 / 2, ("forward", "backward")[index % 5 > 2]) for index in range(500)]
    found = joined(blocks, most)
    assert len(found) <= most
    assert [part for each in found for part in each.parts] == [part for each in blocks for part in each.parts]
    assert all(one.end <= two.start for one, two in pairwise(found))


def test_lanes_tell_streams_and_groups_apart():
    step = Step(groups=((0, 1), (0, 2))).kernel(1).kernel(1, stream=3).collective(1, 40, group=1).collective(2, 4)
    (role,) = seen_of(step).played.roles.values()
    assert [lane.name for lane in lanes_of(role, 100, 10)] == ["compute", "stream 3", "g0", "g1", "exposed"]


@pytest.mark.slow
def test_a_page_in_a_browser(step, tmp_path):
    """The timeline is that of `Timeline.draw`; here only that it stands in this page as well."""
    written(seen_of(step), tmp_path, title="train.py")
    with browser() as tab:
        for width in (1280, 400):
            tab.open(tmp_path / "report.html", width)
            assert tab.run("document.documentElement.scrollWidth") <= width
            left, top = tab.run(
                "(({left, top}) => [left, top])(document.querySelector('canvas').getBoundingClientRect())"
            )
            tab.point(left + 118 + 4, top + 4 + 20 + 12 - tab.run("window.scrollY"))
            assert tab.run("document.querySelector('output').textContent") == "forward, 1.00 s: mm at train.py:1"
            assert tab.complaints == []
            assert len(tab.requests) == 1


CUT = """(() => [...document.querySelectorAll("section, .card")].flatMap(card => [...card.querySelectorAll("*")].filter(
    each => !each.closest("svg, canvas, .ticks") && (
        each.getBoundingClientRect().right > card.getBoundingClientRect().right
        || (each.scrollWidth > each.clientWidth && getComputedStyle(each).overflowX !== "visible")
    )).map(each => card.querySelector("h2, span").textContent + ": " + each.textContent)))()"""
"""Texts of cards that are cut at the right edge, or can only be read by scrolling."""


@pytest.mark.slow
def test_no_card_cuts_a_text(tmp_path):
    """The names of three long operators did not wrap, so that the Figures were cut at 1280 pixels."""
    step = Step(groups=((0, 1),))
    for index in range(3):
        step.kernel(1, name=f"a_fused_operator_{index}_whose_name_is_not_short_at_all")
    step.collective(1, 40).allocate(1, 512 * MIB).wait(1).kernel(1)
    step.places = [f"/home/somebody/{'projects/' * 9}train.py:{index}" for index in range(len(step.places))]
    written(seen_of(step), tmp_path, title="train.py", tokens=400)
    with browser() as tab:
        for width in (1280, 1000, 400):
            tab.open(tmp_path / "report.html", width)
            assert tab.run(CUT) == [], width
            assert tab.run("document.documentElement.scrollWidth") <= width
