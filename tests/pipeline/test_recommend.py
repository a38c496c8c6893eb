"""The table of schedules: the fastest that fits first, all for the same model."""

from __future__ import annotations

from fractions import Fraction

import pytest

from echelon.errors import InvalidArgument, ScheduleError
from echelon.pipeline import Costs, Schedule, schedules
from echelon.pipeline.plan.action import Action, loop, vee
from echelon.pipeline.schedules.recommendation import cut, held_microbatches, recommend, table


def test_every_schedule_for_training_is_compared():
    options = recommend(Costs(), 4, 8)
    assert {option.schedule.name for option in options} == set(schedules.names()) - {"forward-only"}
    assert all(option.fits for option in options)


def test_all_are_for_the_same_work():
    for option in recommend(Costs(forward=2, backward_input=3, backward_weight=1), 4, 8):
        assert option.timeline.busy == (48,) * 4, option.schedule.name


def test_those_that_fit_come_first_and_then_the_fastest():
    options = recommend(Costs(transfer=0.1), 4, 8, memory_limit=4)
    assert [(not option.fits, option.timeline.span) for option in options] == sorted(
        (not option.fits, option.timeline.span) for option in options
    )
    for option in options:
        assert option.fits == (max(option.peak_microbatches) <= 4)
    assert (options[0].schedule.name, options[-1].fits) == ("zb-v", False)
    assert str(options[0]) == "zb-v: span 25.4, bubble rate 5.5%, memory 4, up to 4 microbatches"
    assert str(options[-1]).endswith(
        "up to 8 microbatches (does not fit: rank 0 holds 8 microbatches, over the limit of 4)"
    )


def test_schedules_of_whole_backwards_have_costs_of_their_own():
    """A backward in two parts takes 3 here and a whole one 2, so a schedule with a smaller bubble is no faster."""
    split, fused = Costs(1, [0, 2, 2, 2], [3, 1, 1, 1]), Costs(1, [0, 1, 1, 1], [2, 1, 1, 1])
    spans = {option.schedule.name: option.timeline.span for option in recommend(split, 4, 32, fused=fused)}
    of_fused = {option.schedule.name: option.timeline.span for option in recommend(fused, 4, 32)}
    of_split = {option.schedule.name: option.timeline.span for option in recommend(split, 4, 32)}
    assert {name for name in spans if spans[name] == of_fused[name]} >= {"1f1b", "gpipe", "interleaved-1f1b"}
    assert {name for name in spans if spans[name] == of_split[name]} >= {"zb-h1", "zb-h2", "zb-v"}
    assert spans["1f1b"] < spans["zb-h1"] < of_split["1f1b"]
    with pytest.raises(InvalidArgument, match=r"fused is 2 \(int\): give Costs"):
        recommend(split, 4, 8, fused=2)
    with pytest.raises(ScheduleError, match="costs and fused have different units"):
        recommend(split, 4, 8, fused=Costs(unit="s"))
    with pytest.raises(ScheduleError, match="forward has 3 values for 4 stages"):
        recommend(split, 4, 8, fused=Costs([1, 2, 3]))


def test_memory_counts_what_is_there_throughout():
    options = recommend(Costs(activation=3), 4, 8, parameters=(10, 20, 30, 40), capacity=45)
    found = {option.schedule.name: option for option in options}
    assert found["1f1b"].peak_memory == (10 + 4 * 3, 20 + 3 * 3, 30 + 2 * 3, 40 + 3)
    assert found["1f1b"].fits
    assert found["gpipe"].peak_memory == (34, 44, 54, 64)
    assert found["gpipe"].problem == "rank 3 holds 64 of memory, over the limit of 45"


@pytest.mark.parametrize(
    ("activation", "parameters", "text", "problem"),
    [
        (1_700, 9_000, "memory 15,800", "rank 0 holds 15,800 of memory, over the limit of 13,000"),
        (2 << 30, 5 << 29, "memory 10.5 GiB", "rank 0 holds 10.5 GiB of memory, over the limit of 10 GiB"),
    ],
)
def test_a_row_shows_time_and_memory_with_its_unit(activation, parameters, text, problem):
    capacity = 13_000 if activation == 1_700 else 10 << 30
    options = recommend(Costs(activation=activation), 4, 8, parameters=parameters, capacity=capacity)
    (row,) = [option for option in options if option.schedule.name == "1f1b"]
    line = f"1f1b: span 33, bubble rate 27.3%, {text}, up to 4 microbatches (does not fit: {problem})"
    assert (str(row), repr(row)) == (line, f"<Option {line}>")
    assert f"  {text.removeprefix('memory ')}  " in table([row])


def test_the_table():
    kept = [option for option in recommend(Costs(), 4, 8, memory_limit=5) if option.schedule.name in ("1f1b", "gpipe")]
    assert table(kept).splitlines() == [
        "schedule  chunks  span  bubble rate  memory  peaks in microbatches, by rank",
        "1f1b      1       33    27.3%        4       4 3 2 1                         fits",
        "gpipe     1       33    27.3%        8       8 8 8 8                         "
        "does not fit: rank 0 holds 8 microbatches, over the limit of 5",
    ]
    (wide,) = [option for option in recommend(Costs(), 12, 12) if option.schedule.name == "1f1b"]
    assert "  12 11 10 9 .. 4 3 2 1  " in table([wide])


def test_it_is_found_beside_the_schedules():
    assert schedules.recommend is recommend


def test_a_schedule_that_does_not_exist_for_the_sizes_is_left_out():
    assert "dualpipe-v" not in {option.schedule.name for option in recommend(Costs(), 4, 6)}


def test_the_search_takes_part_if_asked_to():
    best, *_ = recommend(Costs(forward=3, backward_input=4, transfer=1), 3, 6, memory_limit=2, search=True)
    without, *_ = recommend(Costs(forward=3, backward_input=4, transfer=1), 3, 6, memory_limit=2)
    assert best.fits
    assert best.timeline.span <= without.timeline.span
    assert recommend(Costs(transfer=(1, 2)), 3, 6, search=True)[0].fits


def test_one_rank():
    assert {option.timeline.makespan for option in recommend(Costs(1, 1, 1, transfer=()), 1, 3)} == {9}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Costs(), 0, 4), "num_ranks=0: 1f1b needs a whole number of at least 1, such as 4"),
        ((Costs(), 4, 0), "num_microbatches=0: "),
        ((Costs(forward=(1, 2)), 4, 4), "forward has 2 values for 4 stages"),
        ((Costs(forward=[1] * 6), 4, 4), "forward has 6 values for 4 stages"),
    ],
)
def test_sizes_and_costs_that_cannot_be(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        recommend(*arguments)


def test_options_are_a_table_wherever_they_are_shown():
    options = recommend(Costs(transfer=Fraction(1, 10)), 4, 8, memory_limit=4)
    assert isinstance(options, tuple)
    assert str(options) == table(options)
    assert "Fraction" not in repr(options)
    assert repr(options).startswith("<10 schedules:\nschedule ")
    shown = options._repr_html_()
    assert shown.count("<tr>") == 1 + len(options)
    assert shown.startswith("<table><thead><tr><th>schedule</th>")
    assert "<td>does not fit: rank 0 holds 7 microbatches, over the limit of 4</td>" in shown


def test_parameters_for_other_ranks():
    with pytest.raises(ScheduleError, match="parameters has 3 values for 2 ranks: give one number, or one per rank"):
        recommend(Costs(), 2, 4, parameters=(1, 2, 3))


def test_stages_are_cut_into_equal_parts():
    costs = Costs(forward=(2, 4), backward_input=3, weight_activation=1, overlapped=(5.0, 6.0), transfer=(7,))
    halves = cut(costs, loop(2, 2))
    assert halves.forward == (1, 1, 2, 2), "the first rank's layers become the first two stages"
    assert halves.backward_input == Fraction(3, 2)
    assert (halves.activation, halves.weight_activation) == (0.5, Fraction(1, 2))
    assert halves.overlapped == (2.5, 2.5, 3.0, 3.0)
    assert cut(costs, loop(2)) is costs


def test_costs_of_several_stages_per_rank_are_joined_and_cut_again():
    costs = Costs(forward=(1, 3, 2, 4), backward_input=1, transfer=(5, 6, 7), unit="s", memory_unit="B")
    whole = cut(costs, loop(2))
    assert (whole.forward, whole.backward_input, whole.transfer) == ((4, 6), 2, (6,))
    assert (whole.unit, whole.memory_unit) == ("s", "B")
    assert cut(costs, loop(2, 2)) is costs
    assert cut(costs, loop(2, 4)).forward == (1, 1, 1, 1, *[Fraction(6, 4)] * 4)
    # Stages of the model are the same work, whichever way it was measured.
    four = Costs(forward=(2, 3, 2, 3), backward_input=2, backward_weight=1)
    for option in recommend(four, 2, 4, search=True):
        assert sum(option.timeline.busy) == 4 * 2 * (5 + 4 + 2), option.schedule.name


def test_only_the_first_part_of_stage_0_has_no_input_gradient():
    costs = Costs(backward_input=(0, 2, 2), backward_weight=(4, 2, 2))
    assert cut(costs, loop(3, 2)).backward_input == (0, 1, 1, 1, 1, 1)
    assert cut(costs, loop(3, 2)).backward_weight == (2, 1, 1, 1, 1, 1)
    # One of its own, small as it is, is divided like the others.
    small = Costs(backward_input=(1, 2, 2), backward_weight=(3, 2, 2))
    assert cut(small, loop(3, 2)).backward_input[:3] == (Fraction(1, 2), Fraction(1, 2), 1)
    # Two stages of a rank joined are one whose inputs need no gradient.
    both = cut(Costs(backward_input=(0, 2, 2, 2), backward_weight=(4, 2, 2, 2)), loop(2))
    assert (both.backward_input, both.backward_weight) == ((0, 4), (8, 4))
    alone = cut(Costs(backward_input=(0, 2), backward_weight=(4, 2)), loop(1, 4))
    assert (alone.backward_input, alone.backward_weight) == ((0, 1, 1, 1), (2, 1, 1, 1))


def test_options_have_the_units_of_their_costs():
    costs = Costs(forward=0.25, backward_input=0.25, backward_weight=0.25, activation=4096, unit="s", memory_unit="B")
    (best, *_) = options = recommend(costs, 2, 4, capacity=100)
    assert str(best).startswith("zb-v: span 3 s, bubble rate 0.0%, memory 8 KiB, up to 2 microbatches")
    assert "holds 8 KiB of memory, over the limit of 100 B" in str(options)


def test_a_transfer_belongs_to_the_link_between_two_ranks():
    costs = Costs(transfer=(1, 5, 2))
    assert cut(costs, loop(4, 2)).transfer == (1, 5, 2, 5, 1, 5, 2), "from the last to the first: as the longest"
    assert cut(costs, vee(4)).transfer[:3] == (1, 5, 2)
    assert cut(costs, vee(4)).transfer[4:] == (2, 5, 1)
    assert cut(Costs(transfer=3), vee(4)).transfer == 3


def test_memory_in_microbatches():
    schedule, costs = schedules.build("interleaved-1f1b", 4, 8, 2), Costs(activation=3)
    assert held_microbatches(schedule, costs, schedule.simulate(costs)) == (5.5, 4.5, 3.5, 2.5)
    nothing = Costs(activation=0)
    assert held_microbatches(schedule, nothing, schedule.simulate(nothing)) == (0, 0, 0, 0)


def test_costs_are_those_by_default():
    assert table(recommend(None, 2, 2)) == table(recommend(Costs(), 2, 2))


@pytest.mark.parametrize("arguments", [{"memory_limit": float("nan")}, {"capacity": -1}, {"memory_limit": True}])
def test_a_limit_that_is_no_amount(arguments):
    with pytest.raises(InvalidArgument, match="give a number of at least 0, or None for no limit"):
        recommend(Costs(), 2, 4, **arguments)


def test_parameters_that_are_no_amount():
    with pytest.raises(ScheduleError, match="parameters=-1: give an amount of memory of at least 0"):
        recommend(Costs(), 2, 4, parameters=-1)


def test_a_schedule_with_an_idle_rank_is_not_compared():
    """It was a ValueError."""
    idle = Schedule("idle", 1, (0,), ((Action(0, "F", 0), Action(0, "B", 0)), ()))
    with pytest.raises(ScheduleError, match="idle has more stages on one rank than on another"):
        recommend(Costs(), 2, 1, own=[idle])
