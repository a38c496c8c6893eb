"""Pictures of timelines: what is in them, and that anything can be drawn."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from echelon.errors import EchelonError, FileError, InvalidArgument
from echelon.pipeline import Costs, Schedule, schedules
from echelon.pipeline.plan.action import parse
from echelon.timeline.boxes import critical_lines
from echelon.timeline.drawing import compact
from echelon.timeline.figure import figure_of
from echelon.timeline.palette import COLORS
from echelon.timeline.timeline import Level, Timeline, Transfer


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


def panels(figure) -> list:
    """Axes of the timelines, without those of the legend."""
    return [axes for axes in figure.axes if axes.get_label() != "legend"]


def polygons(axes, gid: str) -> list[tuple[float, float, float, float, str]]:
    """Left, right, top, bottom and colour of every polygon of a kind."""
    found = []
    for collection in axes.collections:
        if collection.get_gid() != gid:
            continue
        assert isinstance(collection, PolyCollection)
        fills = collection.get_facecolors()
        for number, path in enumerate(collection.get_paths()):
            (left, top), (right, bottom) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            fill = matplotlib.colors.to_hex(fills[number % len(fills)])
            found.append((float(left), float(right), float(top), float(bottom), fill))
    return found


def written(axes, gid: str) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_gid() == gid]


def titles(figure) -> list[str]:
    return [text.get_text() for text in figure.texts]


def texts(svg: str) -> list[str]:
    return [
        "".join(element.itertext()) for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


ANYTHING = {
    "no ranks": Timeline((), (), ()),
    "no spans": Timeline(((), ()), ((), ()), ((), ())),
    "one rank of two": Timeline((("a",), ()), ((3,), ()), ((5,), ())),
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
    timeline.draw(tmp_path / "picture.html")
    found = texts((tmp_path / "picture.svg").read_text(encoding="utf-8"))
    assert [text for text in found if text.startswith("rank ")] == [
        f"rank {rank}" for rank in range(timeline.num_ranks)
    ]


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_steps_without_any_time_are_drawn_with_a_warning(suffix, tmp_path):
    nothing = Timeline((("a", "b"),), ((3, 3),), ((3, 3),))
    for draw in (nothing.draw, lambda path: ANYTHING["text"].draw(path, against=nothing)):
        with pytest.warns(match='give echelon simulate --costs measured, or costs="measured" in P') as caught:
            draw(tmp_path / f"picture{suffix}")
        assert caught[0].filename == __file__
    assert "bubble rate" not in nothing._repr_html_()


@pytest.mark.parametrize("timeline", ANYTHING.values(), ids=ANYTHING.keys())
def test_anything_can_be_drawn_against_anything(timeline, tmp_path):
    for number, (below, above) in enumerate([(timeline, ANYTHING["text"]), (ANYTHING["text"], timeline)]):
        below.draw(tmp_path / f"{number}.svg", against=above)
        assert "communication" in texts((tmp_path / f"{number}.svg").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".SVG", b"<?xml"), (".html", b"<!doctype html>")]
)
def test_the_suffix_says_the_format(suffix, magic, tmp_path):
    ANYTHING["text"].draw(tmp_path / f"picture{suffix}", theme="dark")
    assert (tmp_path / f"picture{suffix}").read_bytes().startswith(magic)


def test_text_is_drawn_as_it_is(tmp_path):
    ANYTHING["text"].draw(tmp_path / "a.svg")
    found = texts((tmp_path / "a.svg").read_text(encoding="utf-8"))
    assert {"all_reduce 1", "_x & <y>", "$\\frac$"} <= set(found)


def test_a_picture_says_what_it_shows(tmp_path):
    timeline = simulated("zb-v", 4, 8, transfer=0.25)
    timeline.draw(tmp_path / "plan.svg")
    found = texts((tmp_path / "plan.svg").read_text(encoding="utf-8"))
    assert found.count("7") == 2 * 3 * 4, "microbatch 7 in F, I and W of two stages on each of four ranks"
    assert "zb-v, simulated" in found
    assert "makespan 54.75, bubble rate 6.8 %, peak activations 8 on every rank" in found
    assert "time (units of the plan)" in found
    assert {"rank 0", "rank 3", "forward", "input gradient", "weight gradient", "second chunk"} <= set(found)
    assert {"warm-up and drain", "waits for a rank", "waits for a transfer", "critical path"} <= set(found)
    assert "activations held, peak at the right" in found


def test_a_drawing_has_few_bytes_for_a_step(tmp_path):
    timeline = simulated("zb-v", 4, 8, transfer=0.1)
    timeline.draw(tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    assert len(text) / sum(map(len, timeline.steps)) < 400, "1036 as matplotlib writes it"


def test_shapes_of_one_style_become_one_path():
    one, other = (
        '<path d="M 1.23456 -0.001 \nL 2 3 \nz\n" style="fill: red"/>',
        '<path d="M 4 5 \n" style="fill: red"/>',
    )
    assert compact(f"{one}\n  {other}") == '<path d="M1.23 0L2 3zM4 5" style="fill: red"/>'
    blue = other.replace("red", "blue")
    assert compact(f"{one}\n{blue}").count("<path") == 2
    transparent = other.replace("red", "red; opacity: 0.5")
    assert compact(transparent * 2).count("<path") == 2, "overlapping ones are darker"
    box = '<path d="M 1 2 \nL 5 2 \nL 5 4 \nL 1 4 \nL 0 0 \nz\nM 9 4 \nL 5 4 \nC 1 1 2 2 3 3 \nL 3 4"/>'
    assert compact(box) == '<path d="M1 2h4v2h-4L0 0zM9 4h-4C1 1 2 2 3 3L3 4"/>'
    assert compact(compact(box)) == compact(box)
    assert compact('<path d="M 300.127 20 \nL 301.25 18.5"/>') == '<path d="M300.13 20l1.12-1.5"/>'


def test_texts_of_one_kind_become_one_group():
    """Each had a group of its own with the style and an id, which a document may have once."""
    one, two = (
        f'<g id="label">\n <text style="fill: {color}" x="1">{color} &lt;</text>\n</g>' for color in ("red", "blue")
    )
    peak = one.replace("label", "peak")
    assert compact(f"{one}\n{two}\n{one}\n{peak}") == (
        '<g id="label"><g style="fill: red"><text x="1">red &lt;</text><text x="1">red &lt;</text></g>'
        '<g style="fill: blue"><text x="1">blue &lt;</text></g></g>\n'
        '<g id="peak">\n<text style="fill: red" x="1">red &lt;</text>\n</g>'
    )


def test_warm_up_and_drain_have_one_entry_for_both_panels(tmp_path):
    """One panel has only a warm-up: the legend had an entry for that beside the one for both."""
    short = Timeline(((parse("0F0"),), (parse("1F0"),)), ((0,), (1,)), ((1,), (3,)))
    late = Timeline(((parse("0F0"),), (parse("1F0"),)), ((1,), (2,)), ((3,), (3,)))
    short.draw(tmp_path / "both.svg", against=late)
    found = re.findall(r">([^<]*(?:warm-up|drain)[^<]*)</text>", (tmp_path / "both.svg").read_text())
    assert found == ["warm-up and drain"]


def test_boxes_are_where_the_spans_are():
    timeline = simulated("1f1b", 3, 4)
    (axes,) = panels(figure_of(timeline))
    rows = [round(place, 6) for place in axes.get_yticks()]
    found = {(left, right, rows.index(round((top + bottom) / 2, 6))) for left, right, top, bottom, _ in boxes(axes)}
    assert found == {(span.start, span.end, rank) for rank, spans in enumerate(timeline.spans) for span in spans}
    assert axes.get_xlim() == (0, timeline.makespan)


def boxes(axes):
    return polygons(axes, "boxes")


def test_a_colour_is_a_kind_and_a_line_a_chunk():
    (axes,) = panels(figure_of(simulated("zb-v", 2, 4)))
    assert {fill for *_, fill in boxes(axes)} == {COLORS["F"], COLORS["I"], COLORS["W"]}
    marks = polygons(axes, "chunks")
    assert len(marks) == 2 * 4 * 3, "F, I and W of four microbatches on the second stage of two ranks"
    inside = {(left, right) for left, right, *_ in boxes(axes)}
    assert {(left, right) for left, right, *_ in marks} <= inside


def test_idle_time_is_shaded_by_its_cause():
    timeline = simulated("1f1b", 4, 8, transfer=0.25)
    (axes,) = panels(figure_of(timeline))
    for cause in ("warm_up", "other_ranks", "transfer", "drain"):
        drawn = sum(right - left for left, right, *_ in polygons(axes, f"idle {cause}"))
        assert drawn == pytest.approx(sum(float(getattr(idle, cause)) for idle in timeline.idle)), cause
    assert polygons(axes, "idle overhead") == [], "a simulation knows all causes"
    (unknown,) = panels(figure_of(Timeline((("a", "b"),), ((0, 3),), ((1, 4),))))
    assert [place[:2] for place in polygons(unknown, "idle overhead")] == [(1, 3)]


def test_the_critical_path_goes_from_the_first_step_to_the_last():
    timeline = simulated("1f1b", 3, 4, transfer=0.5)
    lines = critical_lines(timeline)
    assert min(start for start, *_ in lines) == 0
    assert max(end for _, _, end, _ in lines) == timeline.makespan
    crossings = [line for line in lines if line[1] != line[3]]
    assert all(end - start == 0.5 for start, _, end, _ in crossings)
    assert sum(end - start for start, _, end, _ in lines) == pytest.approx(timeline.makespan), "without a hole"
    (axes,) = panels(figure_of(timeline))
    (drawn,) = [collection for collection in axes.collections if collection.get_gid() == "critical path"]
    assert len(drawn.get_segments()) == len(lines)
    assert critical_lines(ANYTHING["text"]) == [], "without transfers there is nothing to follow"


def lines_through_labels(axes, lines) -> list[str]:
    """Labels whose middle has a line within 3 points."""
    place, crossed = axes.transData.transform, []
    near = 3 / 72 * axes.figure.dpi
    for text in axes.texts:
        middle = place(text.get_position())
        for line in map(place, lines):
            path = Path(line)
            box = Bbox.from_extents(*(middle - near), *(middle + near))
            if text.get_gid() == "label" and path.intersects_bbox(box, filled=False):
                crossed.append(text.get_text())
    return crossed


def critical_path(axes):
    (drawn,) = [collection for collection in axes.collections if collection.get_gid() == "critical path"]
    return drawn.get_segments()


def transferred(ranks, start: int) -> Timeline:
    """Microbatch 0 on the first of some ranks, and on the last one from `start` on. All compute microbatch 1 first."""
    steps = tuple((parse(f"{rank}F1"), parse(f"{rank}F0")) for rank in range(3))
    starts = tuple((0, start if rank == ranks[-1] else 2) for rank in range(3))
    ends = tuple((1, start + 2 if rank == ranks[-1] else 4) for rank in range(3))
    return Timeline(steps, starts, ends, transfers=(Transfer(ranks[0], 0, ranks[-1], 1, 1, start),))


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0), (2, 1)])
def test_the_critical_path_does_not_cross_labels_of_neighbouring_ranks(ranks):
    """The oblique line of a measured run once crossed the next step of the rank that it comes from."""
    (axes,) = panels(figure_of(transferred(ranks, start=5)))
    assert any(len({y for _, y in line.tolist()}) > 1 for line in critical_path(axes)), "a line to another rank"
    assert lines_through_labels(axes, critical_path(axes)) == []


@pytest.mark.parametrize("ranks", [(0, 2), (2, 0)])
def test_the_critical_path_passes_below_the_labels_between_distant_ranks(ranks, tmp_path):
    timeline = transferred(ranks, start=5)
    figure = figure_of(timeline)
    (axes,) = panels(figure)
    assert lines_through_labels(axes, critical_path(axes)) == ["0"]
    ((*_, fill),) = polygons(axes, "halo")
    assert fill == COLORS["F"]
    order = {artist.get_gid(): artist.get_zorder() for artist in axes.get_children()}
    assert order["boxes"] < order["critical path"] < order["halo"] < order["label"]


def test_the_strip_of_memory_is_as_high_as_what_a_rank_holds():
    timeline = simulated("1f1b", 4, 8)
    (axes,) = panels(figure_of(timeline))
    heights = [bottom - top for _, _, top, bottom, _ in polygons(axes, "memory")]
    assert [height / heights[-1] for height in heights] == pytest.approx([4, 3, 2, 1])
    assert written(axes, "peak") == ["4", "3", "2", "1"]


def test_rows_may_have_titles_of_their_own():
    timeline = Timeline((("a",), ("b",)), ((0,), (0,)), ((1,), (1,)), titles=("rank 0", "rank 7"))
    (axes,) = panels(figure_of(timeline))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 7"]
    assert "rank 7  b" in str(timeline)


def test_memory_in_bytes_and_time_in_seconds():
    held = ((Level(0, 3 << 29), Level(2e-3, 1 << 29)),)
    timeline = Timeline((("forward",),), ((0.0,),), ((4e-3,),), memory=held, memory_unit="B", unit="s", name="step")
    figure = figure_of(timeline)
    (axes,) = panels(figure)
    assert written(axes, "peak") == ["1.5 GiB"]
    assert axes.get_xlabel() == "time (ms)"
    assert titles(figure) == ["step", "makespan 4 ms, bubble rate 0.0 %"]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe-v", "v-half", "gpipe"])
def test_memory_over_time_has_the_peaks_of_the_plan(name):
    timeline = simulated(name, 4, 8)
    assert tuple(max(amount for _, amount in levels) for levels in timeline.memory) == timeline.peak_activations
    assert {levels[-1].amount for levels in timeline.memory} == {0}, "nothing is held in the end"
    for levels in timeline.memory:
        assert [level.time for level in levels] == sorted(level.time for level in levels)
        assert min(level.amount for level in levels) == 0


def test_an_overlapped_step_is_two_halves():
    timeline = Timeline(((parse("(0F1;3B0)OVERLAP_F_B"),),), ((0,),), ((3,),))
    (axes,) = panels(figure_of(timeline))
    forward, backward = boxes(axes)
    assert forward[:2] == backward[:2] == (0, 3)
    assert forward[2] < forward[3] == pytest.approx(backward[2]), "the forward above, where y is smaller"
    assert written(axes, "label") == ["1", "0"]


@pytest.mark.parametrize("plan_first", [True, False])
def test_the_plan_is_drawn_above_the_run_with_equal_work_equally_wide(plan_first):
    schedule = schedules.build("1f1b", 2, 8)
    plan, run = schedule.simulate(Costs()), recorded(schedule, unit=0.01, wait=0.2)
    order = (plan, run) if plan_first else (run, plan)
    figure = figure_of(*order)
    above, below = panels(figure)
    assert above.get_position().y0 > below.get_position().y1
    width_of_work = [max(timeline.busy) / axes.get_xlim()[1] for timeline, axes in ((plan, above), (run, below))]
    assert width_of_work[0] == pytest.approx(width_of_work[1])
    assert below.get_xlim()[1] == pytest.approx(run.makespan), "the longer one fills its axis"
    first, figures, second, more = titles(figure)
    assert (first, second) == ("1f1b, simulated", "1f1b, measured")
    assert figures.startswith("makespan 27, bubble rate 11.1 %")
    assert more.startswith("makespan 0.3, bubble rate 20.0 %")


def test_two_plans_with_equal_costs_share_a_scale():
    figure = figure_of(simulated("zb-h1", 4, 8), against=simulated("gpipe", 4, 8))
    above, below = panels(figure)
    assert [titles(figure)[0], titles(figure)[2]] == ["gpipe, simulated", "zb-h1, simulated"]
    assert above.get_xlim() == below.get_xlim() == (0, 33)


def test_a_run_in_the_unit_of_its_plan_shares_its_scale():
    schedule = schedules.build("1f1b", 2, 8)
    plan, run = schedule.simulate(Costs()), replace(recorded(schedule, unit=1.1, wait=0.2), unit="s")
    above, below = panels(figure_of(run, against=plan))
    assert above.get_xlabel() == below.get_xlabel() == "time (s)"
    assert above.get_xlim() == below.get_xlim() == (0, pytest.approx(run.makespan))


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches"),
    [
        ("1f1b", 1, 1),
        ("zb-h1", 4, 16),
        ("interleaved-1f1b", 8, 32),
        pytest.param("1f1b", 16, 48, marks=pytest.mark.slow),
        ("1f1b", 32, 64),
    ],
)
def test_text_stays_inside_boxes_and_is_never_small(name, num_ranks, num_microbatches):
    chunks = 2 if name == "interleaved-1f1b" else 1
    figure = figure_of(schedules.build(name, num_ranks, num_microbatches, chunks).simulate())
    (axes,) = panels(figure)
    renderer = FigureCanvasAgg(figure).get_renderer()
    places = {}
    for left, right, top, bottom, _ in boxes(axes):
        places[(left + right) / 2, round((top + bottom) / 2, 6)] = axes.transData.transform(
            [[left, bottom], [right, top]]
        )
    for text in axes.texts:
        if text.get_gid() != "label":
            continue
        (left, bottom), (right, top) = places[text.get_position()[0], round(text.get_position()[1], 6)]
        box = text.get_window_extent(renderer)
        assert left <= box.x0 <= box.x1 <= right
        assert bottom <= box.y0 <= box.y1 <= top
    shown = [text for text in figure.findobj(Text) if text.get_text().strip()]
    assert min(text.get_fontsize() for text in shown) >= 7


def test_labels_thin_out_by_kind():
    """At 16 ranks and 48 microbatches forwards are too narrow for two digits, backwards are not."""
    (axes,) = panels(figure_of(simulated("1f1b", 16, 48)))
    assert len(written(axes, "label")) == 16 * 48
    (axes,) = panels(figure_of(simulated("1f1b", 96, 8)))
    assert 20 < len(axes.get_yticks()) < 96, "titles of ranks that would overlap are left out"


def test_a_large_schedule_is_a_few_collections_and_no_text():
    (axes,) = panels(figure_of(simulated("1f1b", 16, 128)))
    assert len(boxes(axes)) == 16 * 128 * 2
    assert written(axes, "label") == []
    assert len(axes.collections) < 10


def test_the_same_timeline_gives_the_same_file_whatever_the_style(tmp_path):
    timeline = simulated("1f1b", 2, 4)
    for suffix in (".svg", ".png", ".pdf"):
        timeline.draw(tmp_path / f"a{suffix}")
        with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 20, "svg.fonttype": "path"}):
            before = dict(matplotlib.rcParams)
            timeline.draw(tmp_path / f"b{suffix}")
            assert dict(matplotlib.rcParams) == before
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_mistakes_are_one_line_each(monkeypatch, tmp_path):
    timeline = simulated("1f1b", 2, 2)
    with pytest.raises(
        EchelonError, match=r"cannot draw into 'a\.gif': give a name that ends in \.svg, \.png, \.pdf or \.html$"
    ):
        timeline.draw("a.gif")
    monkeypatch.chdir(tmp_path)
    for name in ("nofolder/x.png", "nofolder/x.html"):
        with pytest.raises(FileError, match=r"the folder nofolder does not exist; make it first: mkdir -p nofolder$"):
            timeline.draw(name)
    with pytest.raises(InvalidArgument, match=r"theme='blue': give 'light' or 'dark'$"):
        timeline.draw("a.png", theme="blue")
    with pytest.raises(InvalidArgument, match=r"against is of type Schedule: give a Timeline$"):
        timeline.draw("a.png", against=schedules.build("1f1b", 2, 2))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EchelonError, match=r"drawing \.svg needs matplotlib: pip install matplotlib; \.html needs no"):
        timeline.draw("a.svg")
    timeline.draw("a.html")
    assert (tmp_path / "a.html").stat().st_size > 1000


def test_drawing_leaves_pyplot_and_torch_alone(tmp_path):
    code = (
        "import sys; from echelon.pipeline import schedules\n"
        "schedules.build('1f1b', 2, 2).simulate().draw(sys.argv[1])\n"
        "print(sorted({'matplotlib.pyplot', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a.png"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_id_comes_twice_in_a_picture_of_two_panels(tmp_path):
    first, second = simulated("1f1b", 2, 4), simulated("zb-h1", 2, 4)
    second.draw(tmp_path / "plan.svg", against=first)
    text = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    ids = re.findall(r' id="([^"]*)"', text)
    assert {"boxes", "boxes 2", "label", "label 2"} <= set(ids)
    assert len(ids) == len(set(ids))
    assert compact(text) == text
