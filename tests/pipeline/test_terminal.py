"""Timelines as text."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from echelon.pipeline import Costs, schedules
from echelon.pipeline.plan.action import parse
from echelon.timeline.boxes import boxes_of
from echelon.timeline.palette import COLORS
from echelon.timeline.terminal import lines
from echelon.timeline.timeline import Timeline


def simulated(name: str, num_ranks: int, num_microbatches: int, **costs) -> Timeline:
    return schedules.build(name, num_ranks, num_microbatches).simulate(Costs(**costs))


def plain(timeline: Timeline, width: int) -> str:
    drawn = lines(boxes_of(timeline), width, in_color=False)
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in drawn)


PICTURES = {
    80: """
rank 0  F0 F1 ......B0--- F2 B1--- ...B2---
rank 1     F0 B0--- F1 B1--- F2 B2---
""",
    34: """
rank 0  F-F-....B---F-B---..B---
rank 1    F-B---F-B---F-B---
""",
    20: """
rank 0  FF..B-FB-.B-
rank 1   FB-FB-FB-
""",
    16: """
rank 0  F.BBFB.B
rank 1   BFBFBB
""",
}


@pytest.mark.parametrize("width", PICTURES)
def test_a_step_says_as_much_as_fits(width):
    assert plain(simulated("1f1b", 2, 3), width) == PICTURES[width].strip()


@pytest.mark.parametrize("width", [1, 7, 8, 20, 80, 81, 120, 300])
@pytest.mark.parametrize("in_color", [True, False])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (3, 7), (12, 40)])
def test_lines_fit_the_width_and_are_equally_long(num_ranks, num_microbatches, in_color, width):
    timeline = simulated("zb-h1", num_ranks, num_microbatches, forward=0.7, transfer=0.3)
    found = lines(boxes_of(timeline), width, in_color)
    lengths = {sum(len(piece.text) for piece in line) for line in found}
    assert len(found) == num_ranks
    assert len(lengths) == 1
    assert lengths.pop() <= max(width, len("rank 11  ") + 1)


def test_colours_are_those_of_the_kind():
    first = lines(boxes_of(simulated("1f1b", 2, 3)), 80, in_color=True)[0]
    assert [(piece.text, piece.background) for piece in first if piece.background] == [
        ("▏0", COLORS["F"]),
        ("▏1", COLORS["F"]),
        ("▏0  ", COLORS["B"]),
        ("▏2", COLORS["F"]),
        ("▏1  ", COLORS["B"]),
        ("▏2  ", COLORS["B"]),
    ]
    assert "·" in "".join(piece.text for piece in first if not piece.background)


def test_idle_time_is_marked_by_its_cause():
    assert plain(simulated("1f1b", 2, 2, transfer=1), 60).splitlines() == [
        "rank 0  F0 F1 .........~~~B0--- ~~~B1---",
        "rank 1        F0 B0--- F1 B1---",
    ]
    unknown = Timeline((("a", "b"),), ((0, 3),), ((1, 4),))
    assert plain(unknown, 16) == "rank 0  a ????b"


def test_letters_keep_the_shares_of_kinds_where_steps_are_narrower_than_columns():
    first, *_ = plain(simulated("1f1b", 4, 400), 60).splitlines()
    steady = first.removeprefix("rank 0  ")[4:-4]
    assert steady.count("B") == pytest.approx(2 * steady.count("F"), abs=3), "a backward is twice as long"
    assert set(steady) == {"F", "B"}


def test_a_later_chunk_is_in_lower_case_or_underlined():
    timeline = simulated("zb-v", 2, 2)
    assert {"F", "f", "I", "i", "W", "w"} <= set(plain(timeline, 40))
    drawn = lines(boxes_of(timeline), 120, in_color=True)
    marked = [piece for line in drawn for piece in line if piece.is_underlined]
    assert len(marked) == 2 * 2 * 3, "F, I and W of two microbatches on the second stage of two ranks"
    assert "lower case: second chunk" in str(timeline)


def test_a_timeline_is_its_picture_as_text():
    text = str(simulated("1f1b", 2, 3))
    assert text.startswith("1f1b, simulated\nmakespan 12, bubble rate 25.0 %, peak activations 2 1\n\nrank 0  F0 F1 ")
    assert text.endswith("\n\nF forward   B backward   . waits for a rank")
    assert text.isascii()
    assert max(map(len, str(simulated("v-half", 4, 40)).splitlines())) <= 100
    assert "and 16 more rows: draw(FILE) draws them" in str(simulated("1f1b", 80, 4))


def test_a_step_of_two_actions():
    timeline = Timeline(((parse("(0F1;3B0)OVERLAP_F_B"), parse("0F2")),), ((0, 3),), ((3, 4),))
    assert plain(timeline, 80) == "rank 0  F1;b0------------ F2---"
    assert plain(timeline, 16) == "rank 0  &-----F-"
    (line,) = lines(boxes_of(timeline), 16, in_color=True)
    assert (line[2].text, line[2].foreground, line[2].background) == ("▀▀▀▀▀▀", COLORS["F"], COLORS["B"])


@pytest.mark.parametrize(
    ("timeline", "text"),
    [
        (Timeline((), (), ()), ""),
        (Timeline(((), ()), ((), ()), ((), ())), "rank 0\nrank 1"),
        (Timeline((("a", "b"),), ((3, 3),), ((3, 3),)), "rank 0"),
        (Timeline((("a", "b"),), ((3, 3),), ((3, 6),)), "rank 0  b"),
        (Timeline((("wait",), ()), ((0.5,), ()), ((2.5,), ())), "rank 0  wait\nrank 1"),
        (Timeline((("wait 1", "go"),), ((0, Fraction(3, 2)),), ((1, 2),)), "rank 0  wait 1------- ???????go----"),
        (Timeline((("", "go"),), ((0, 1),), ((1, 2),)), "rank 0  -- go"),
        (Timeline((("a", "b", "c"),), ((0, 1, 2),), ((5, 2, 3),)), "rank 0  a--------"),
    ],
)
def test_anything_can_be_shown(timeline, text):
    assert plain(timeline, 80) == text
    assert len(lines(boxes_of(timeline), 80, in_color=True)) == timeline.num_ranks
    assert len(lines(boxes_of(timeline), 10, in_color=True)) == timeline.num_ranks


STRIPS = """
1f1b, simulated
makespan 12, bubble rate 25.0 %, peak activations 4 KiB, 2 KiB

rank 0  F0 F1 ......B0--- F2 B1--- ...B2---
4 KiB   ▄▄▄████████████████████████▄▄▄▄▄▄▄▄▄
rank 1     F0 B0--- F1 B1--- F2 B2---
2 KiB      ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄

F forward   B backward   █ most memory that a rank holds   . waits for a rank
"""


def test_memory_in_bytes_is_a_strip_below_its_rank():
    in_bytes = replace(simulated("1f1b", 2, 3, activation=2048), memory_unit="B")
    assert str(in_bytes) == STRIPS.strip()


def test_ranks_without_room_for_strips_have_none():
    in_bytes = replace(simulated("1f1b", 33, 3, activation=2048), memory_unit="B")
    assert "\n6 KiB" not in str(in_bytes)
    assert "rank 32" in str(in_bytes)


def test_the_first_ranks_alone_are_laid_out():
    timeline = simulated("1f1b", 4, 3)
    assert boxes_of(timeline, 2).rows == boxes_of(timeline).rows[:2]
