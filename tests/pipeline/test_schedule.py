"""The Schedule value, and the schedules by name: sizes, pictures, errors."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import pytest
from hypothesis import given, settings

from echelon.errors import ScheduleError
from echelon.pipeline.plan.action import Action
from echelon.pipeline.plan.cost import Costs
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.schedules import build, dualpipe_v, gpipe, names, one_f_one_b, v_shaped, zero_bubble
from echelon.pipeline.schedules.forward_only import forward_only
from echelon.timeline.terminal import picture
from tests.helpers.named_schedules import V_SHAPED, schedules

PICTURES = {
    gpipe.gpipe: ("gpipe", 3, 4, 1),
    gpipe.looped_bfs: ("looped-bfs", 2, 3, 2),
    one_f_one_b.one_f_one_b: ("1f1b", 3, 4, 1),
    one_f_one_b.interleaved_1f1b: ("interleaved-1f1b", 2, 4, 2),
    zero_bubble.zb_h1: ("zb-h1", 3, 4, 1),
    zero_bubble.zb_h2: ("zb-h2", 3, 6, 1),
    zero_bubble.zb_v: ("zb-v", 2, 4, 2),
    v_shaped.v_half: ("v-half", 2, 4, 2),
    v_shaped.v_min: ("v-min", 2, 4, 2),
    forward_only: ("forward-only", 3, 4, 1),
}


@pytest.mark.parametrize("make", PICTURES, ids=lambda make: make.__name__)
def test_the_picture_in_the_docstring_is_the_schedule(make):
    _is_drawn(make.__doc__, *PICTURES[make])


def test_the_picture_of_dualpipe_v_is_the_schedule():
    _is_drawn(dualpipe_v.__doc__, "dualpipe-v", 2, 4, 2)


def _is_drawn(doc, name, ranks, microbatches, chunks):
    drawn = [line.strip() for line in doc.splitlines() if line.strip().startswith("rank ")]
    timeline = build(name, ranks, microbatches, chunks).simulate(Costs(1, 1, 1))
    assert drawn == picture(timeline).splitlines()
    assert f"{ranks} ranks" in doc
    assert f"{microbatches} microbatches" in doc
    assert chunks == 1 or name in V_SHAPED or f"{chunks} chunks" in doc


def test_sizes():
    schedule = build("interleaved-1f1b", num_ranks=4, num_microbatches=8, num_chunks=2)
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_chunks, schedule.num_microbatches) == (4, 8, 2, 8)
    assert schedule.placement == (0, 1, 2, 3, 0, 1, 2, 3)
    assert repr(schedule) == "<Schedule interleaved-1f1b: 4 ranks, 8 stages, 8 microbatches>"
    assert repr(build("1f1b", 1, 1)) == "<Schedule 1f1b: 1 rank, 1 stage, 1 microbatch>"


def test_a_v_shaped_placement():
    assert build("dualpipe-v", 3, 6).placement == (0, 1, 2, 2, 1, 0)


def test_text_form():
    assert str(build("1f1b", 2, 3)) == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2"


def test_a_schedule_is_a_value():
    schedule = build("1f1b", 2, 3)
    assert schedule == build("1f1b", 2, 3)
    assert hash(schedule) == hash(build("1f1b", 2, 3))
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    with pytest.raises(FrozenInstanceError):
        schedule.name = "mine"


def test_lists_become_tuples():
    schedule = Schedule("mine", 1, [0], [[Action(0, "F", 0), Action(0, "B", 0)]])
    assert schedule.orders == ((Action(0, "F", 0), Action(0, "B", 0)),)
    assert schedule.placement == (0,)
    schedule.check()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(schedules())
def test_text_form_reads_back(schedule):
    again = Schedule.from_text(str(schedule), name=schedule.name)
    assert again == schedule


def test_forward_only_is_told():
    schedule = build("forward-only", 2, 3)
    assert schedule.forward_only
    assert repr(schedule).endswith("forward only>")
    assert not build("gpipe", 2, 3).forward_only


def test_forward_only_for_any_placement():
    schedule = forward_only((0, 1, 2, 2, 1, 0), 6)
    schedule.check()
    assert schedule.placement == (0, 1, 2, 2, 1, 0)
    # Rank 0 is idle while the first microbatches go down and up, and from then on never again.
    assert schedule.simulate(Costs(1)).idle[0].other_ranks <= 4


@pytest.mark.parametrize("ranks", range(1, 7))
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_forward_only_over_chunks_wastes_only_the_fill(ranks, chunks):
    timeline = build("forward-only", ranks, 3 * ranks, chunks).simulate(Costs(1))
    assert timeline.makespan == 3 * ranks * chunks + ranks - 1


def test_one_chunk_interleaved_is_1f1b():
    assert build("interleaved-1f1b", 4, 9, 1).orders == build("1f1b", 4, 9).orders


@pytest.mark.parametrize(("name", "with_one"), [("interleaved-1f1b", "1f1b"), ("looped-bfs", "gpipe")])
def test_schedules_of_chunks_are_not_others_by_default(name, with_one):
    assert build(name, 4, 8) == build(name, 4, 8, 2)
    assert build(name, 4, 8).simulate(Costs(1)).makespan < 2 * build(with_one, 4, 8).simulate(Costs(1)).makespan


@pytest.mark.parametrize("group_size", [4, 5, 6, 8, 9])
@pytest.mark.parametrize("microbatches", [1, 3, 5, 8, 13, 16, 21])
def test_any_number_of_microbatches_in_groups_of_any_size(group_size, microbatches):
    schedule = build("interleaved-1f1b", 4, microbatches, 3, group_size=group_size)
    schedule.check()
    assert max(schedule.simulate().peak_activations) <= 2 * 3 + 2 * group_size + 1


@pytest.mark.parametrize("microbatches", range(4, 30))
def test_default_groups_are_as_fast_as_even_ones(microbatches):
    timeline = build("interleaved-1f1b", 4, microbatches, 2).simulate(Costs(1, 1, 1))
    assert timeline.span == 3 * (2 * microbatches + 3)


def test_an_unknown_name():
    with pytest.raises(ScheduleError, match="no schedule is called '1b1f': choose from gpipe, 1f1b, interleaved-1f1b"):
        build("1b1f", 4, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpipe", 0, 8), "num_ranks=0: gpipe needs a whole number of at least 1"),
        (("gpipe", 4, -1), "num_microbatches=-1: gpipe needs"),
        (("gpipe", 4, 2.5), r"num_microbatches=2\.5: gpipe needs"),
        (("gpipe", True, 2), "num_ranks=True: gpipe needs"),
        (("looped-bfs", 4, 8, 0), "num_chunks=0: looped-bfs needs"),
        (("1f1b", 4, 8, 2), "num_chunks=2: 1f1b has 1 per rank; pass 1, or take interleaved-1f1b"),
        (("dualpipe-v", 4, 8, 1), "num_chunks=1: dualpipe-v has 2 per rank; pass 2"),
        (("dualpipe-v", 4, 7), "num_microbatches=7: dualpipe-v needs at least 2 per rank; give 8 or more"),
        (("1f1b", 4, 8, 1, 4), "group_size=4: 1f1b has no groups"),
        (("interleaved-1f1b", 4, 8, 2, 3), "group_size=3: .* give at least 4"),
        (("interleaved-1f1b", 4, 8, 2, 0), "group_size=0: interleaved-1f1b needs"),
        (
            ("looped-bfs", 2, 2, 10**30),
            "num_ranks=2, num_microbatches=2 and num_chunks=10+ are 40+ forwards, too .* 4000000$",
        ),
        (("1f1b", 10**30, 2), "are 2(0+) forwards, too many"),
        (("1f1b", 2, 10**30), "are 2(0+) forwards, too many"),
        (("zb-v", 2000, 2000), "and num_chunks=2 are 8000000 forwards, too many"),
    ],
)
def test_sizes_that_cannot_be(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        build(*arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_microbatches": 0}, "num_microbatches=0: a schedule needs at least 1"),
        ({"orders": ()}, "an order for at least one rank"),
        ({"placement": ()}, "a placement of at least one stage"),
        (
            {"placement": (0, 2)},
            "but there are orders for 2 ranks: place it on ranks 0 and 1",
        ),
        ({"orders": ((Action(0, "F", 0),), (Action(1, "F", 0), 3))}, r"step 1 of rank 1 is 3 \(int\): give Action"),
    ],
)
def test_values_that_do_not_fit_together(changes, message):
    with pytest.raises(ScheduleError, match=message):
        replace(build("1f1b", 2, 3), **changes)


def test_every_name_is_built_in_one_size_by_default():
    for name in names():
        schedule = build(name, 2, 4)
        assert schedule.name == name
        schedule.check()


def test_pictures_take_any_times():
    timeline = build("1f1b", 2, 2).simulate(Costs(Fraction(1, 2), 1, 1, transfer=Fraction(1, 4)))
    assert picture(timeline).splitlines() == [
        "rank 0  0F0 0F1                     0B0------------     0B1------------",
        "rank 1        1F0 1B0------------ 1F1 1B1------------",
    ]
