"""Timelines: what they measure and how they explain it."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import pytest

from echelon.timeline.timeline import Gap, Idle, LazySequence, Span, Timeline, Transfer
from echelon.timeline.words import figures


@pytest.fixture
def timeline() -> Timeline:
    """Rank 1 waits for "a" of rank 0, first while it runs and then while it travels."""
    return Timeline(
        steps=(("a", "b"), ("c", "d")),
        starts=((2, 5), (3, 7)),
        ends=((5, 6), (4, 10)),
        transfers=(Transfer(0, 0, 1, 1, start=5, end=7),),
    )


def test_measures(timeline):
    assert timeline.num_ranks == 2
    assert timeline.spans[1] == (Span("c", 3, 4), Span("d", 7, 10))
    assert (timeline.spans[1][1].name, timeline.spans[1][1].duration) == ("d", 3)
    assert (timeline.start, timeline.end, timeline.makespan) == (2, 10, 8)
    assert timeline.span == 7, "rank 1 from 3 to 10; the makespan starts at 2"
    assert timeline.busy == (4, 4)
    assert timeline.bubble_rate == Fraction(3, 7), "whole numbers stay exact"


def test_idle_time_is_split_by_cause(timeline):
    assert timeline.idle[0] == Idle(warm_up=0, other_ranks=0, transfer=0, overhead=0, drain=4)
    assert timeline.idle[1] == Idle(warm_up=1, other_ranks=1, transfer=2, overhead=0, drain=0)


def test_the_critical_path_goes_through_the_transfer(timeline):
    path = timeline.critical_path
    assert [(item.rank, item.span.name) for item in path] == [(0, "a"), (1, "d")]
    assert [item.transfer for item in path] == [None, timeline.transfers[0]]


def test_a_transfer_that_came_in_time_is_not_critical():
    timeline = Timeline(
        steps=(("a",), ("b", "c")),
        starts=((0,), (0, 4)),
        ends=((1,), (4, 5)),
        transfers=(Transfer(0, 0, 1, 1, start=1, end=2),),
    )
    assert [item.span.name for item in timeline.critical_path] == ["b", "c"]
    assert timeline.idle[1] == Idle(0, 0, 0, 0, 0)


def test_of_two_transfers_the_last_to_arrive_counts():
    early, late = Transfer(0, 0, 2, 0, start=1, end=6), Transfer(1, 0, 2, 0, start=5, end=7)
    timeline = Timeline((("a",), ("b",), ("c",)), ((0,), (0,), (7,)), ((1,), (5,), (8,)), (early, late))
    assert timeline.critical_path[-1].transfer == late


def test_a_recorded_run_cannot_tell_when_a_transfer_arrived():
    timeline = Timeline(
        steps=(("a",), ("b", "c", "d")),
        starts=((0,), (0, 3, 6)),
        ends=((2,), (1, 5, 7)),
        transfers=(Transfer(0, 0, 1, 1, start=2, end=None),),
    )
    assert timeline.idle[1] == Idle(warm_up=0, other_ranks=1, transfer=1, overhead=1, drain=0)
    assert [item.span.name for item in timeline.critical_path] == ["a", "c", "d"]


def test_known_causes_cut_idle_time_that_no_transfer_explains():
    # 1 to 9 is idle: unknown until 2, a rank until 4, unknown until 6, a transfer until the end.
    causes = [Gap(0.0, 1.0, "transfer"), Gap(2.0, 4.0, "other_ranks"), Gap(6.0, 9.5, "transfer")]
    timeline = Timeline((("a", "b"),), ((0.0, 9.0),), ((1.0, 10.0),), causes=[causes])
    assert [gap for gap in timeline.gaps[0] if gap.cause == "other_ranks"] == [Gap(2.0, 4.0, "other_ranks")]
    assert timeline.idle[0] == Idle(warm_up=0, other_ranks=2, transfer=3, overhead=3, drain=0)


def test_a_cause_that_begins_by_rounding_later_leaves_no_unknown_one():
    causes = [Gap(1.0 + 1e-12, 9.0, "other_ranks")]
    timeline = Timeline((("a", "b"),), ((0.0, 9.0),), ((1.0, 10.0),), causes=[causes])
    assert timeline.gaps[0] == (Gap(1.0, 9.0, "other_ranks"),)


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, "makespan 10, bubble rate 80.0 %"), (0.25, "makespan 10, bubble 25.0 %"), (math.nan, "makespan 10")],
)
def test_a_known_bubble_takes_the_place_of_the_rate(share, text):
    timeline = Timeline((("a", "b"),), ((0.0, 9.0),), ((1.0, 10.0),), bubble_share=share)
    assert figures(timeline) == text


@pytest.mark.parametrize("moment", [3, 3.0])
def test_steps_without_any_time_have_no_bubble_rate(moment):
    timeline = Timeline(steps=(("a", "b"),), starts=((moment, moment),), ends=((moment, moment),))
    assert math.isnan(timeline.bubble_rate)
    assert figures(timeline) == "makespan 0"


def test_float_times():
    timeline = Timeline(steps=(("a",), ("b",)), starts=((0.0,), (0.5,)), ends=((0.5,), (2.0,)))
    assert timeline.bubble_rate == 0.0
    assert timeline.makespan == 2.0
    assert repr(timeline) == "<Timeline of 2 ranks, 2 spans, makespan 2.0>"


def test_a_timeline_without_spans():
    timeline = Timeline(steps=((), ()), starts=((), ()), ends=((), ()))
    assert (timeline.makespan, timeline.span, timeline.bubble_rate, timeline.critical_path) == (0, 0, 0, ())
    assert timeline.idle == (Idle(0, 0, 0, 0, 0),) * 2


def test_a_rank_without_spans_is_in_warm_up_for_ever():
    timeline = Timeline(steps=(("a",), ()), starts=((0,), ()), ends=((3,), ()))
    assert timeline.idle[1].warm_up == 3


def test_a_lazy_sequence_is_made_once_and_when_looked_at():
    made = []

    def make():
        made.append(1)
        return range(3)

    items = LazySequence(make)
    assert made == []
    assert (len(items), items[1], items[1:], list(items)) == (3, 1, (1, 2), [0, 1, 2])
    assert made == [1]


@pytest.mark.parametrize(
    "module", ["echelon.timeline.timeline", "echelon.pipeline.schedules", "echelon.pipeline.plan.schedule"]
)
def test_plans_need_no_torch(module):
    forbidden = "{'torch', 'numpy', 'socket', 'threading', 'asyncio'}"
    program = f"import sys, {module}; print(sorted({forbidden} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
