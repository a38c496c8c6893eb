"""Timelines as pages: what is in them, and how they behave in a browser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from echelon.pipeline import Costs, Schedule, schedules
from echelon.timeline.timeline import Span, Timeline
from tests.helpers.browser import browser

HOSTILE = "</script><script>document.title = 'run'</script>\"' onload=x \udcff & <b>$title"


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)[1])


@pytest.fixture
def plan():
    return schedules.build("zb-v", 4, 8).simulate(Costs(transfer=0.25))


@pytest.fixture
def pair(tmp_path):
    """A page with a plan and a measured run of it."""
    schedule = schedules.build("1f1b", 2, 4)
    planned = schedule.simulate(Costs(transfer=0.1))
    times = [
        [(9 + start / 100, 9 + end / 100) for start, end in zip(*rank, strict=True)]
        for rank in zip(planned.starts, planned.ends, strict=True)
    ]
    path = tmp_path / "pair.html"
    schedule.recorded(times).draw(path, against=planned)
    return path


def test_a_page_has_every_step_once(plan, tmp_path):
    plan.draw(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text("utf-8")
    (panel,) = data_of(text)["panels"]
    assert [len(row["boxes"]) // row["size"] for row in panel["rows"]] == [len(spans) for spans in plan.spans]
    labels = {full for full, _, _ in data_of(text)["labels"]}
    assert labels == {span.name for spans in plan.spans for span in spans}
    assert [row["peak"] for row in panel["rows"]] == ["8"] * 4
    assert len(text) < 60_000


def test_a_page_needs_no_network_and_runs_no_text(tmp_path):
    lane = (Span(HOSTILE, 0, 2),)
    timeline = Timeline(((HOSTILE,),), ((0,),), ((3,),), beside=((lane,),), name=HOSTILE)
    timeline.draw(tmp_path / "a.html", against=timeline)
    text = (tmp_path / "a.html").read_text("utf-8")
    assert not re.search(r"https?:|url\(|@import|<link| src=", text)
    assert "default-src 'none'" in text
    assert text.count("<script") == 2, "the data and the code"
    assert data_of(text)["labels"][0][0] == HOSTILE
    assert HOSTILE not in text


def test_a_notebook_shows_a_page_in_a_frame(plan):
    class Frame(HTMLParser):
        def handle_starttag(self, tag, attributes):
            self.found = tag, dict(attributes)

    parser = Frame()
    parser.feed(plan._repr_html_())
    tag, attributes = parser.found
    assert tag == "iframe"
    assert attributes["sandbox"] == "allow-scripts", "its script cannot reach the notebook"
    assert attributes["title"] == "zb-v, simulated"
    assert len(data_of(attributes["srcdoc"])["panels"][0]["rows"]) == 4


def test_a_long_run_is_text_in_a_notebook():
    shown = schedules.build("1f1b", 16, 800).simulate()._repr_html_()
    assert shown.startswith("<pre>1f1b, simulated\n")
    assert len(shown) < 10_000


def test_a_notebook_shows_a_schedule_by_its_timeline():
    schedule = schedules.build("1f1b", 2, 4)
    assert schedule._repr_html_() == schedule.simulate()._repr_html_()
    assert Schedule("wrong", 4, schedule.placement, ((), ()))._repr_html_() is None, "its text says what is wrong"


@pytest.mark.slow
def test_a_page_in_a_browser(pair, plan, tmp_path):
    with browser() as tab:
        tab.open(pair)
        assert tab.run("[...document.querySelectorAll('h3')].map(head => head.textContent)") == [
            "1f1b, simulated",
            "1f1b, measured",
        ]
        left, top = tab.run("(({left, top}) => [left, top])(document.querySelector('canvas').getBoundingClientRect())")
        first = left + 118 + 10

        def told():
            return tab.run("document.querySelector('output').textContent")

        def view():
            return [float(part) for part in tab.run("document.querySelector('.timeline').dataset.view").split()]

        tab.point(first, top + 14)
        assert told() == "rank 0, 0F0, forward of microbatch 0, 0 to 1, takes 1"
        assert tab.run("document.querySelector('.tip').hidden") is False
        tab.point(first, top + 14 + 18)
        assert told().startswith("rank 0, holds 1 activations at 0.")
        tab.point(first, top + 14 + 40)
        assert told() == "rank 1, idle: warm-up, 0 to 1.1, takes 1.1"

        tab.wheel(first, top + 14, -240, modifiers=2)
        start, end = view()
        assert end - start == pytest.approx(0.5)
        assert start < 0.01, "the time below the pointer stays there"
        tab.wheel(first, top + 14, 240, modifiers=8)
        assert view()[0] > start + 0.05
        assert view()[1] - view()[0] == pytest.approx(0.5)
        tab.key("0")
        assert view() == [0, 1]
        tab.key("+")
        tab.key("ArrowRight")
        assert view() == [pytest.approx(0.35), pytest.approx(0.85)]
        tab.run("document.querySelector('.fit').click()")
        assert view() == [0, 1]

        tab.key("/")
        tab.type("1B3")
        assert tab.run("document.querySelector('.found').textContent") == "2 found"
        tab.key("Enter")
        tab.key("Enter")
        assert tab.run("document.querySelector('.found').textContent") == "2 of 2"
        assert told().startswith("rank 1, 1B3, backward of microbatch 3, 0.11")
        assert view()[1] - view()[0] < 1

        assert tab.complaints == []
        assert tab.requests == [pair.as_uri()], "nothing but the file itself"

        pictures = set()
        plan.draw(tmp_path / "plan.html")
        for width in (1280, 400):
            for dark in (False, True):
                tab.open(tmp_path / "plan.html", width, 700, dark)
                assert tab.run("document.documentElement.scrollWidth") <= width, "no page to be moved sideways"
                assert tab.complaints == []
                pictures.add(tab.picture())
        assert len(pictures) == 4

        tab.open(write(tmp_path / "notebook.html", f"<!doctype html><body>{plan._repr_html_()}"))
        assert tab.complaints == []


def write(path, text):
    path.write_text(text, encoding="utf-8", errors="replace")
    return path
