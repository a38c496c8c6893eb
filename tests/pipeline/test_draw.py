"""Pictures of timelines: what is in them, and that anything can be drawn."""

from __future__ import annotations

import re
import subprocess
import sys
from fractions import Fraction
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection

from echelon.errors import EchelonError
from echelon.pipeline import Costs, Schedule, schedules
from echelon.pipeline.plan.action import parse
from echelon.timeline.figure import figure_of
from echelon.timeline.timeline import Timeline


def simulated(name: str, num_ranks: int, num_microbatches: int, **costs) -> Timeline:
    return schedules.build(name, num_ranks, num_microbatches).simulate(Costs(**costs))


def recorded(schedule: Schedule, unit: float, wait: float) -> Timeline:
    """As simulated, but in another unit, at another time of day, and every step later by its number of waits."""
    planned = schedule.simulate(Costs())
    times = [
        [
            (50 + unit * (start + wait * n), 50 + unit * (end + wait * n))
            for n, (start, end) in enumerate(zip(*rank, strict=True))
        ]
        for rank in zip(planned.starts, planned.ends, strict=True)
    ]
    return schedule.recorded(times)


def boxes(axes) -> list[tuple[float, float, float, float, str]]:
    """Left, right, top, bottom and colour of every box."""
    found = []
    for collection in axes.collections:
        assert isinstance(collection, PolyCollection)
        for path, fill in zip(collection.get_paths(), collection.get_facecolors(), strict=True):
            (left, top), (right, bottom) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            found.append((left, right, top, bottom, matplotlib.colors.to_hex(fill)))
    return found


def texts(svg: str) -> list[str]:
    return [
        "".join(element.itertext()) for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


ANYTHING = {
    "no ranks": Timeline((), (), ()),
    "no spans": Timeline(((), ()), ((), ()), ((), ())),
    "one rank of two": Timeline((("a",), ()), ((3,), ()), ((5,), ())),
    "no time at all": Timeline((("a", "b"),), ((3, 3),), ((3, 3),)),
    "a step without time": Timeline((("a", "b"),), ((3, 3),), ((3, 6),)),
    "text": Timeline(
        (("all_reduce 1", "_x & <y>", "$\\frac$"), ("",)), ((0.0, 1.5, 3), (1.0,)), ((1.0, 2.0, 9.0), (4,))
    ),
    "fractions": Timeline(
        (("a",), ("b",)), ((Fraction(1, 3),), (Fraction(2, 3),)), ((Fraction(1, 2),), (Fraction(7),))
    ),
    "text and actions": Timeline(((parse("0F0"), "copy"),), ((0, 1),), ((1, 2),)),
    "spans that overlap": Timeline((("a", "b", "c"),), ((0, 1, 2),), ((5, 2, 3),)),
}


@pytest.mark.parametrize("timeline", ANYTHING.values(), ids=ANYTHING.keys())
def test_anything_can_be_drawn(timeline, tmp_path):
    timeline.draw(tmp_path / "picture.svg")
    assert "idle" in texts((tmp_path / "picture.svg").read_text(encoding="utf-8"))


@pytest.mark.parametrize("timeline", ANYTHING.values(), ids=ANYTHING.keys())
def test_anything_can_be_drawn_against_anything(timeline, tmp_path):
    for number, (below, above) in enumerate([(timeline, ANYTHING["text"]), (ANYTHING["text"], timeline)]):
        below.draw(tmp_path / f"{number}.svg", against=above)
        assert "all_reduce" in texts((tmp_path / f"{number}.svg").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".SVG", b"<?xml")])
def test_the_suffix_says_the_format(suffix, magic, tmp_path):
    ANYTHING["text"].draw(tmp_path / f"picture{suffix}")
    assert (tmp_path / f"picture{suffix}").read_bytes().startswith(magic)


def test_text_is_drawn_as_it_is(tmp_path):
    ANYTHING["text"].draw(tmp_path / "a.svg")
    found = texts((tmp_path / "a.svg").read_text(encoding="utf-8"))
    assert {"all_reduce 1", "all_reduce", "_x & <y>", "$\\frac$"} <= set(found)


def test_every_step_is_a_box_with_its_text(tmp_path):
    timeline = simulated("zb-h1", 4, 8)
    timeline.draw(tmp_path / "plan.svg")
    found = texts((tmp_path / "plan.svg").read_text(encoding="utf-8"))
    expected = [span.name for rank in timeline.spans for span in rank]
    assert sorted(text for text in found if re.fullmatch(r"\d+[FIW]\d+", text)) == sorted(expected)
    assert {"rank 0", "rank 3", "forward", "input gradient", "weight gradient", "idle"} <= set(found)
    assert "microbatch 0, 6" in found
    assert "simulated: makespan 27, bubble rate 11.1 %, peak activations 4 on every rank" in found


def test_boxes_are_where_the_spans_are():
    timeline = simulated("1f1b", 3, 4)
    (axes,) = figure_of(timeline).axes
    spans = {(span.start, span.end, rank) for rank, spans in enumerate(timeline.spans) for span in spans}
    assert {(left, right, round((top + bottom) / 2)) for left, right, top, bottom, _ in boxes(axes)} == spans
    assert axes.get_xlim() == (0, timeline.makespan)


def test_an_overlapped_step_is_two_halves():
    timeline = Timeline(((parse("(0F1;3B0)OVERLAP_F_B"),),), ((0,),), ((3,),))
    (axes,) = figure_of(timeline).axes
    forward, backward = boxes(axes)
    assert forward[:2] == backward[:2] == (0, 3)
    assert forward[2] < forward[3] == pytest.approx(backward[2]), "the forward above, where y is smaller"
    assert [text.get_text() for text in axes.texts] == ["0F1", "3B0"]


@pytest.mark.parametrize("plan_first", [True, False])
def test_the_plan_is_drawn_above_the_run_with_equal_work_equally_wide(plan_first):
    schedule = schedules.build("1f1b", 2, 8)
    plan, run = schedule.simulate(Costs()), recorded(schedule, unit=0.01, wait=0.2)
    order = (plan, run) if plan_first else (run, plan)
    above, below = figure_of(*order).axes
    assert above.get_position().y0 > below.get_position().y1
    width_of_work = [max(timeline.busy) / axes.get_xlim()[1] for timeline, axes in ((plan, above), (run, below))]
    assert width_of_work[0] == pytest.approx(width_of_work[1])
    assert below.get_xlim()[1] == pytest.approx(run.makespan), "the longer one fills its axis"
    assert above.get_title(loc="left").startswith("simulated: makespan 27, bubble rate 11.1 %")
    assert below.get_title(loc="left").startswith("measured: makespan 0.3, bubble rate 20.0 %")


def test_two_plans_with_equal_costs_share_a_scale():
    above, below = figure_of(simulated("zb-h1", 4, 8), against=simulated("gpipe", 4, 8)).axes
    assert "makespan 33" in above.get_title(loc="left")
    assert above.get_xlim() == below.get_xlim() == (0, 33)


def test_a_run_in_the_unit_of_its_plan_shares_its_scale():
    schedule = schedules.build("1f1b", 2, 8)
    plan, run = schedule.simulate(Costs()), recorded(schedule, unit=1.1, wait=0.2)
    above, below = figure_of(run, against=plan).axes
    assert above.get_xlim() == below.get_xlim() == (0, pytest.approx(run.makespan))


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches"),
    [("1f1b", 1, 1), ("zb-h1", 4, 16), ("interleaved-1f1b", 8, 32), ("1f1b", 8, 48), ("1f1b", 32, 64)],
)
def test_labels_stay_inside_their_boxes(name, num_ranks, num_microbatches):
    chunks = 2 if name == "interleaved-1f1b" else 1
    figure = figure_of(schedules.build(name, num_ranks, num_microbatches, chunks).simulate())
    (axes,) = figure.axes
    renderer = FigureCanvasAgg(figure).get_renderer()
    widths = {}
    for left, right, top, bottom, _ in boxes(axes):
        widths[(left + right) / 2, round((top + bottom) / 2)] = axes.transData.transform([[left, 0], [right, 0]])[:, 0]
    for text in axes.texts:
        left, right = widths[text.get_position()[0], round(text.get_position()[1])]
        box = text.get_window_extent(renderer)
        assert left <= box.x0 <= box.x1 <= right


def test_a_large_schedule_is_a_few_collections_and_no_text():
    (axes,) = figure_of(simulated("1f1b", 16, 128)).axes
    assert len(boxes(axes)) == 16 * 128 * 2
    assert (len(axes.collections), len(axes.texts)) == (2, 0)


def test_the_same_timeline_gives_the_same_file_whatever_the_style(tmp_path):
    timeline = simulated("1f1b", 2, 4)
    for suffix in (".svg", ".png", ".pdf"):
        timeline.draw(tmp_path / f"a{suffix}")
        with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 20, "svg.fonttype": "path"}):
            before = dict(matplotlib.rcParams)
            timeline.draw(tmp_path / f"b{suffix}")
            assert dict(matplotlib.rcParams) == before
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_a_suffix_that_is_no_picture(tmp_path):
    with pytest.raises(
        EchelonError, match=r"cannot draw into 'a\.gif': give a name that ends in \.svg, \.png or \.pdf"
    ):
        simulated("1f1b", 2, 2).draw("a.gif")


def test_without_matplotlib_there_is_a_hint(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EchelonError, match=r"drawing needs matplotlib: pip install matplotlib"):
        simulated("1f1b", 2, 2).draw(tmp_path / "a.svg")


def test_drawing_leaves_pyplot_and_torch_alone(tmp_path):
    code = (
        "import sys; from echelon.pipeline import schedules\n"
        "schedules.build('1f1b', 2, 2).simulate().draw(sys.argv[1])\n"
        "print(sorted({'matplotlib.pyplot', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a.png"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
