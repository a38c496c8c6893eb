"""Programs: what a rank does around the steps of a schedule, checked and proven to end."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import ScheduleError
from echelon.pipeline import schedules
from echelon.pipeline.plan.program import Compute, Flush, Post, Receive, Recompute, Reduce, Send, check_program, lower
from tests.helpers import named_schedules


def test_the_program_of_a_small_schedule():
    program = lower(schedules.build("zb-h1", num_ranks=2, num_microbatches=2), recomputed=[0])
    assert str(program) == (
        "0POST_B0,0F0,0SEND_F0,0F1,0SEND_F1,0POST_B1,0RECV_B0,0RECOMPUTE0,0I0,0W0,0RECV_B1,0RECOMPUTE1,0I1,0W1,0REDUCE,FLUSH\n"
        "1POST_F0,1POST_F1,1RECV_F0,1F0,1I0,1SEND_B0,1RECV_F1,1F1,1I1,1SEND_B1,1W0,1W1,1REDUCE,FLUSH"
    )


def test_neighbours_on_one_rank_send_nothing():
    program = lower(schedules.build("zb-v", num_ranks=1, num_microbatches=2))
    assert not any(isinstance(instruction, Post | Receive | Send) for instruction in program.orders[0])


@settings(deadline=None)
@given(named_schedules.schedules(max_microbatches=16), st.booleans(), st.integers(1, 5))
def test_every_named_schedule_has_a_program_that_ends(schedule, recomputes, lookahead):
    again = range(schedule.num_stages) if recomputes and not schedule.forward_only else ()
    check_program(lower(schedule, again, lookahead))


def program():
    return lower(schedules.build("dualpipe-v", num_ranks=2, num_microbatches=4), recomputed=[1])


def places(program):
    return [(rank, index) for rank, order in enumerate(program.orders) for index in range(len(order))]


def changed(program, rank, order):
    return replace(program, orders=(*program.orders[:rank], tuple(order), *program.orders[rank + 1 :]))


def test_whatever_is_left_out_or_doubled_is_found():
    good = program()
    for rank, index in places(good):
        order = good.orders[rank]
        for wrong in ([*order[:index], *order[index + 1 :]], [*order[: index + 1], *order[index:]]):
            with pytest.raises(ScheduleError, match=f"rank {rank} (lacks|has|does not run)"):
                check_program(changed(good, rank, wrong))


@pytest.mark.parametrize(
    ("kind", "to_end"),
    [(Post, True), (Receive, True), (Send, False), (Recompute, True), (Reduce, False), (Flush, False)],
)
def test_whatever_stands_on_the_wrong_side_is_found(kind, to_end):
    good = program()
    moved = 0
    for rank, index in places(good):
        order = list(good.orders[rank])
        if isinstance(order[index], kind):
            instruction = order.pop(index)
            order.insert(len(order) if to_end else 0, instruction)
            moved += 1
            with pytest.raises(ScheduleError, match=rf"rank {rank} has {instruction} after|rank {rank} has .* after"):
                check_program(changed(good, rank, order))
    assert moved


def test_a_recomputation_before_its_forward_is_found():
    good = program()
    rank = 1
    order = list(good.orders[rank])
    again = next(instruction for instruction in order if isinstance(instruction, Recompute))
    order.remove(again)
    order.insert(0, again)
    with pytest.raises(ScheduleError, match=f"rank 1 has .*1F{again.microbatch}.* after 1RECOMPUTE{again.microbatch}"):
        check_program(changed(good, rank, order))


def test_a_program_of_another_schedule_is_refused():
    other = schedules.build("zb-v", num_ranks=2, num_microbatches=4)
    with pytest.raises(ScheduleError, match="rank 0 does not run the steps of the schedule in its order"):
        check_program(replace(program(), schedule=other))


def test_ranks_that_wait_for_each_other_are_named():
    """Each sends only after it has received: every instruction is there, and in an order that suits its rank."""
    schedule = schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    good = lower(schedule)
    order = list(good.orders[0])
    send = next(item for item in order if str(item) == "0SEND_F0")
    order.remove(send)
    order.insert(order.index(Compute(schedule.orders[0][-1])) + 1, send)
    with pytest.raises(ScheduleError) as caught:
        check_program(changed(good, 0, order))
    assert "rank 0 waits for ever at 0RECV_B0" in str(caught.value)
    assert "rank 1 waits for ever at 1RECV_F0" in str(caught.value)


def test_a_rank_whose_message_nobody_expects_is_named():
    """With a strict network, what is sent leaves only when its receive is posted."""
    schedule = schedules.build("gpipe", num_ranks=2, num_microbatches=1)
    good = lower(schedule)
    order = list(good.orders[0])
    post = next(item for item in order if isinstance(item, Post))
    order.remove(post)
    order.insert(order.index(next(item for item in order if isinstance(item, Receive))), post)
    check_program(changed(good, 0, order))
