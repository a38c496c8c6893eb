"""Schedules planned again for stages whose backward has no halves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.pipeline import Costs, schedules
from echelon.pipeline.plan.action import actions_of
from echelon.pipeline.plan.fuse import fused, split_stages
from tests.helpers import named_schedules

SPLIT = ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v")


@given(named_schedules.schedules(max_ranks=4, max_microbatches=10, among=SPLIT), st.data())
def test_the_stages_asked_for_have_whole_backwards_and_the_rest_is_as_before(schedule, data):
    stages = data.draw(st.sets(st.integers(0, schedule.num_stages - 1)))
    result = fused(schedule, stages)
    result.check()
    assert split_stages(result) == split_stages(schedule) - stages
    for before, after in zip(schedule.orders, result.orders, strict=True):
        untouched = [action for step in before for action in actions_of(step) if action.stage not in stages]
        assert [action for step in after for action in actions_of(step) if action.stage not in stages] == untouched
        forwards = [action for step in before for action in actions_of(step) if action.kind == "F"]
        assert [action for step in after for action in actions_of(step) if action.kind == "F"] == forwards


def test_a_whole_backward_stands_where_the_stage_before_waits_for_it():
    schedule = schedules.build("zb-h1", num_ranks=2, num_microbatches=3)
    assert str(fused(schedule, [1])) == "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1B0,1F1,1B1,1F2,1B2"


def test_the_shorter_of_two_steps_is_taken():
    """With weights that cost nothing it is the same; when nothing else is to do, the place of W is as good."""
    schedule = schedules.build("zb-h2", num_ranks=4, num_microbatches=8)
    for stage in range(4):
        one = fused(schedule, [stage], Costs(1, 1, 3))
        assert one.simulate(Costs(1, 1, 3)).makespan <= fused(schedule, [stage]).simulate(Costs(1, 1, 3)).makespan


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_schedule_of_whole_backwards_stays_what_it_is(name):
    schedule = schedules.build(name, num_ranks=2, num_microbatches=3)
    assert fused(schedule, [0, 1]) is schedule
