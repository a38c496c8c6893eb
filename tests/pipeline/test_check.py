"""The check finds every mistake, says where it is, and finds none where there is none.

The oracle is another algorithm: sets, and the standard library's topological sort over all dependencies.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import ScheduleError
from echelon.pipeline.plan.action import Action, Overlapped, Step, actions_of
from echelon.pipeline.plan.check import Mistake
from echelon.pipeline.plan.cost import Costs
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.schedules import build, names
from tests.helpers.named_schedules import schedules, sizes_of


def is_valid(schedule: Schedule) -> bool:
    """Tells by brute force whether a schedule can run."""
    node_of: dict[tuple[str, int, int], object] = {}
    work: Counter[tuple[str, int, int]] = Counter()
    for rank, order in enumerate(schedule.orders):
        for position, step in enumerate(order):
            for stage, kind, microbatch in actions_of(step):
                if not 0 <= stage < schedule.num_stages or schedule.placement[stage] != rank:
                    return False
                for part in {"F": "F", "I": "I", "W": "W", "B": "IW"}[kind]:
                    work[part, stage, microbatch] += 1
                    node_of[part, stage, microbatch] = (rank, position)
    parts = "F" if schedule.forward_only else "FIW"
    wanted = itertools.product(parts, range(schedule.num_stages), range(schedule.num_microbatches))
    if work != Counter(wanted):
        return False
    graph: TopologicalSorter[object] = TopologicalSorter()
    for rank, order in enumerate(schedule.orders):
        for position in range(1, len(order)):
            graph.add((rank, position), (rank, position - 1))
    for (part, stage, microbatch), node in node_of.items():
        needs = {"F": [("F", stage - 1)], "I": [("F", stage), ("I", stage + 1)], "W": [("I", stage)]}[part]
        for needed_part, needed_stage in needs:
            maker = node_of.get((needed_part, needed_stage, microbatch))
            own = part == "W" and maker == node  # the two halves of a fused backward
            if maker is not None and not own:
                graph.add(node, maker)
    try:
        graph.prepare()
    except CycleError:
        return False
    return True


def with_order(schedule: Schedule, rank: int, order: list[Step]) -> Schedule:
    return replace(schedule, orders=tuple(tuple(order) if r == rank else o for r, o in enumerate(schedule.orders)))


def swapped(schedule: Schedule, one: tuple[int, int], other: tuple[int, int]) -> Schedule:
    orders = list(map(list, schedule.orders))
    (rank, index), (other_rank, other_index) = one, other
    orders[rank][index], orders[other_rank][other_index] = orders[other_rank][other_index], orders[rank][index]
    return replace(schedule, orders=tuple(map(tuple, orders)))


def names_one_of(problems: tuple[Mistake, ...], *steps: Step) -> bool:
    texts = " ".join(problem.text for problem in problems)
    return any(str(action) in texts for step in steps for action in actions_of(step))


def assert_judged(schedule: Schedule, *mutated: Step) -> None:
    """The check agrees with the oracle, and what it finds has to do with the steps that were changed."""
    if is_valid(schedule):
        assert schedule.problems == ()
        schedule.simulate()
    else:
        assert schedule.problems
        assert names_one_of(schedule.problems, *mutated)
        with pytest.raises(ScheduleError, match="problem"):
            schedule.simulate()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(schedules())
def test_named_schedules_are_valid(schedule):
    assert schedule.problems == ()
    assert is_valid(schedule)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(schedules(), st.data())
def test_a_deleted_action_is_missed(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    order = list(schedule.orders[rank])
    deleted = order.pop(data.draw(st.integers(0, len(order) - 1)))
    mutant = with_order(schedule, rank, order)
    assert not is_valid(mutant)
    assert any("missing" in problem.text and names_one_of((problem,), deleted) for problem in mutant.problems)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(schedules(), st.data())
def test_a_doubled_action_is_found(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    order = list(schedule.orders[rank])
    doubled = data.draw(st.sampled_from(order))
    order.insert(data.draw(st.integers(0, len(order))), doubled)
    mutant = with_order(schedule, rank, order)
    assert not is_valid(mutant)
    assert any("done 2 times" in problem.text and names_one_of((problem,), doubled) for problem in mutant.problems)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(schedules(), st.data())
def test_swapped_actions_are_found_where_that_matters(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    last = len(schedule.orders[rank]) - 1
    one = data.draw(st.integers(0, last))
    # Near neighbours as often as far ones: many of their swaps are valid.
    other = data.draw(st.integers(max(0, one - 2), min(last, one + 2)) | st.integers(0, last))
    mutant = swapped(schedule, (rank, one), (rank, other))
    assert_judged(mutant, schedule.orders[rank][one], schedule.orders[rank][other])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(schedules(min_ranks=2), st.data())
def test_actions_swapped_between_ranks_are_found(schedule, data):
    rank, other_rank = data.draw(st.permutations(range(schedule.num_ranks)))[:2]
    index = data.draw(st.integers(0, len(schedule.orders[rank]) - 1))
    other_index = data.draw(st.integers(0, len(schedule.orders[other_rank]) - 1))
    mutant = swapped(schedule, (rank, index), (other_rank, other_index))
    assert not is_valid(mutant)
    assert any("wrong rank" in problem.text for problem in mutant.problems)
    assert_judged(mutant, schedule.orders[rank][index], schedule.orders[other_rank][other_index])


@pytest.mark.parametrize("name", names())
def test_every_swap_of_a_small_schedule(name):
    schedule = build(name, *sizes_of(name, 2, 3, 2))
    for rank, order in enumerate(schedule.orders):
        for one, other in itertools.combinations(range(len(order)), 2):
            assert_judged(swapped(schedule, (rank, one), (rank, other)), order[one], order[other])


def test_all_problems_are_reported_at_once():
    schedule = build("1f1b", 3, 4)
    orders = list(map(list, schedule.orders))
    del orders[0][3]  # 0B0
    orders[1].insert(5, Action(1, "W", 0))
    orders[2][0], orders[2][1] = orders[2][1], orders[2][0]
    orders[2].append(Action(7, "F", 0))
    mutant = replace(schedule, orders=tuple(map(tuple, orders)))
    assert [problem.text for problem in mutant.problems] == [
        "the work of 1W0 is done 2 times: 1W0 (rank 1, step 5), 1B0 (rank 1, step 2)",
        "2B0 (rank 2, step 0) comes before 2F0 (rank 2, step 1), which it needs",
        "7F0 (rank 2, step 8) does not exist: the schedule has 3 stages and 4 microbatches, and the kinds F, I, W and "
        "B",
        "0B0 missing on rank 0",
    ]


def test_the_error_shows_the_grid_with_the_places_marked():
    orders = list(map(list, build("1f1b", 2, 2).orders))
    orders[0][0], orders[0][1] = orders[0][1], orders[0][0]
    del orders[1][3]
    schedule = replace(build("1f1b", 2, 2), orders=tuple(map(tuple, orders)))
    with pytest.raises(ScheduleError) as caught:
        schedule.check()
    assert str(caught.value).splitlines() == [
        "schedule '1f1b' has 1 problem:",
        "  - 1B1 missing on rank 1",
        "       0     1     2     3",
        "rank 0  0F1   0F0   0B0   0B1",
        "rank 1  1F0   1B0   1F1  >?<",
    ]


def test_weights_before_the_input():
    order = (Action(0, "F", 0), Action(0, "W", 0), Action(0, "I", 0))
    schedule = Schedule("mine", 1, (0,), (order,))
    assert [problem.text for problem in schedule.problems] == [
        "0W0 (rank 0, step 1) comes before 0I0 (rank 0, step 2), which it needs"
    ]


def test_weights_without_the_input():
    schedule = Schedule("mine", 1, (0,), ((Action(0, "F", 0), Action(0, "W", 0)),))
    assert [problem.text for problem in schedule.problems] == [
        "0W0 (rank 0, step 1) needs 0I0, which never runs",
        "0I0 missing on rank 0",
    ]


def test_a_deadlock_names_the_ranks_and_actions_in_the_cycle_only():
    orders = list(map(list, build("1f1b", 4, 4).orders))
    # Rank 1 wants the gradient of microbatch 0 before it lets microbatch 1 go on; rank 2 wants it the other way round.
    orders[1] = [Action(1, "F", 0), Action(1, "B", 0), *(step for step in orders[1] if step.microbatch > 0)]
    orders[2] = [Action(2, "F", 0), Action(2, "F", 1), *(step for step in orders[2][2:])]
    schedule = replace(build("1f1b", 4, 4), orders=tuple(map(tuple, orders)))
    assert not is_valid(schedule)
    (problem,) = schedule.problems
    assert problem.text == (
        "ranks wait for each other (deadlock): 1B0 (rank 1, step 1) waits for 2B0 (rank 2, step 2); "
        "2F1 (rank 2, step 1) waits for 1F1 (rank 1, step 2)"
    )
    assert set(problem.places) == {(1, 1), (2, 2), (2, 1), (1, 2)}


def test_two_deadlocks_are_both_found():
    pair = [Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)]
    other = [Action(1, "F", 1), Action(1, "B", 1), Action(1, "F", 0), Action(1, "B", 0)]
    twice = [action._replace(microbatch=action.microbatch + 2) for action in pair]
    other_twice = [action._replace(microbatch=action.microbatch + 2) for action in other]
    schedule = Schedule("mine", 4, (0, 1), ((*pair, *twice), (*other, *other_twice)))
    assert not is_valid(schedule)
    assert sum("deadlock" in problem.text for problem in schedule.problems) == 2


def test_stages_of_one_rank_in_the_wrong_order():
    forward, backward = [Action(1, "F", 0), Action(0, "F", 0)], [Action(1, "B", 0), Action(0, "B", 0)]
    schedule = Schedule("mine", 1, (0, 0), ((*forward, *backward),))
    assert [problem.text for problem in schedule.problems] == [
        "1F0 (rank 0, step 0) comes before 0F0 (rank 0, step 1), which it needs"
    ]


def test_a_pair_cannot_need_itself():
    pair = Overlapped(Action(0, "F", 0), Action(0, "B", 0))
    schedule = Schedule("mine", 1, (0,), ((pair,),))
    assert [problem.text for problem in schedule.problems] == [
        "0B0 (rank 0, step 0) comes before 0F0 (rank 0, step 0), which it needs"
    ]


def test_a_pair_of_two_forwards():
    pair = Overlapped(Action(0, "F", 0), Action(0, "F", 1))
    schedule = Schedule("mine", 2, (0,), ((pair,),), forward_only=True)
    assert {problem.text for problem in schedule.problems} == {
        "(0F0;0F1)OVERLAP_F_B (rank 0, step 0) cannot overlap: a pair is F and B, or F and I"
    }


def test_a_pair_with_a_weight_gradient():
    """It was an IndexError."""
    forwards, inputs, weights = ([Action(0, kind, number) for number in range(2)] for kind in "FIW")
    pair = Overlapped(forwards[1], weights[0])
    schedule = Schedule("mine", 2, (0,), ((forwards[0], inputs[0], pair, inputs[1], weights[1]),))
    assert [problem.text for problem in schedule.problems] == [
        "(0F1;0W0)OVERLAP_F_B (rank 0, step 2) cannot overlap: a pair is F and B, or F and I"
    ]


def test_a_pair_whose_forward_does_not_exist():
    """Its backward counts: nothing waits for ever, which was a ValueError."""
    order = (Action(0, "F", 0), Action(1, "F", 0), Overlapped(Action(1, "F", 7), Action(1, "B", 0)), Action(0, "B", 0))
    schedule = Schedule("mine", 1, (0, 0), (order,))
    assert [problem.text for problem in schedule.problems] == [
        "1F7 (rank 0, step 2) does not exist: the schedule has 2 stages and 1 microbatch, and the kinds F, I, W and B"
    ]


def test_a_schedule_of_too_many_forwards_is_refused_at_once():
    with pytest.raises(ScheduleError, match="num_stages=1 and num_microbatches=1000000000 are 1000000000 forwards"):
        Schedule.from_text("0F0,0B0", num_microbatches=10**9)


def test_a_backward_in_a_forward_only_schedule():
    schedule = Schedule("mine", 1, (0,), ((Action(0, "F", 0), Action(0, "B", 0)),), forward_only=True)
    assert [problem.text for problem in schedule.problems] == [
        "0B0 (rank 0, step 1) is a backward in a schedule that is forward only"
    ]


def test_memory_limit():
    schedule = build("1f1b", 4, 8)
    schedule.check(memory_limit=4)
    with pytest.raises(ScheduleError) as caught:
        schedule.check(memory_limit=2)
    assert [line for line in str(caught.value).splitlines() if line.startswith("  -")] == [
        "  - rank 0 holds 4.0 activations at most, over the limit of 2: 3.0 from 0F2 (step 2) on",
        "  - rank 1 holds 3.0 activations at most, over the limit of 2: 3.0 from 1F2 (step 2) on",
    ]


def test_memory_limit_per_rank_and_in_other_units():
    schedule = build("1f1b", 2, 4)
    schedule.check(memory_limit=[2, 1])
    schedule.check(memory_limit=2_000_000, costs=Costs(activation=10**6))
    with pytest.raises(ScheduleError, match=r"rank 1 holds 1\.0 activations at most, over the limit of 0\.5"):
        schedule.check(memory_limit=[2, 0.5])
    with pytest.raises(ScheduleError, match="memory_limit has 3 values for 2 ranks"):
        schedule.check(memory_limit=[1, 2, 3])


def test_a_limit_is_not_missed_by_rounding():
    costs = Costs(activation=0.1, weight_activation=0.07)
    schedule = build("zb-h1", 3, 50)
    schedule.check(memory_limit=0.3, costs=costs)


def test_the_report_of_a_large_schedule_is_short():
    schedule = build("1f1b", 48, 256)
    orders = list(map(list, schedule.orders))
    del orders[40][300]
    mutant = replace(schedule, orders=tuple(map(tuple, orders)))
    with pytest.raises(ScheduleError) as caught:
        mutant.check()
    lines = str(caught.value).splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) < 400
    assert any(">?<" in line and line.startswith("rank 40") for line in lines)


def test_many_problems_are_counted():
    schedule = replace(build("gpipe", 2, 100), orders=(build("gpipe", 2, 100).orders[0], ()))
    with pytest.raises(ScheduleError, match="has 100 problems") as caught:
        schedule.check()
    assert str(caught.value).splitlines()[1:5] == [
        "  - 1F0 and 1B0 missing on rank 1",
        "  - 1F1 and 1B1 missing on rank 1",
        "  - 1F2 and 1B2 missing on rank 1",
        "  - and 97 more of this kind",
    ]


def test_a_limit_that_is_no_number_is_refused():
    with pytest.raises(ScheduleError, match="memory_limit=nan is no amount of memory"):
        build("1f1b", 2, 4).check(memory_limit=float("nan"))
