"""Steps played on round numbers: a kernel moves 100 bytes in 1 s, an all-gather inside a host 20 bytes."""

from dataclasses import replace

import pytest

from echelon.errors import DeadlockError
from echelon.foresight.play.played import Exposed
from echelon.foresight.play.player import play
from echelon.timeline.words import figures
from tests.helpers.traces import LINKS, PLAIN, Step

SECOND = 20
"""Bytes of an all-gather that takes a second: half of them pass a link of 10 bytes per second."""


def played(*steps, classes=None, device=PLAIN, cluster=LINKS):
    traces = {step.rank: step.trace() for step in steps}
    return play(traces, classes or [steps[0].rank] * cluster.world_size, device, cluster)


def test_kernels_of_one_stream_follow_each_other_and_those_of_two_overlap():
    assert played(Step().kernel(1).kernel(2)).seconds == 3
    side = played(Step().kernel(1, stream=1).kernel(2, stream=2))
    # At half of the speed until the first one ends.
    assert sorted((run.start, run.end) for run in side.roles[0].runs) == [(0, 2), (0, 3)]


def test_a_host_that_is_slow_delays_kernels():
    device = replace(PLAIN, launch_seconds=2.0)
    # The second kernel is called at 2 s and ready at 4 s; the first one ran meanwhile.
    assert played(Step().kernel(1).kernel(3), device=device).seconds == 7
    many = Step()
    for seconds in (1, 5, 1, 1):
        many.kernel(seconds)
    assert played(many, device=device).seconds == 4 + 5 + 1 + 1


def test_launches_of_one_operator_cost_the_host_each():
    device = replace(PLAIN, launch_seconds=1.0)
    assert played(Step().kernel(1, launches=3), device=device).seconds == 4


def test_a_collective_runs_beside_kernels_until_it_is_waited_for():
    hidden = Step().collective(1, SECOND).kernel(3).wait(1).kernel(1)
    assert played(hidden).seconds == 4
    bare = Step().kernel(3).collective(1, SECOND).wait(1).kernel(1)
    assert played(bare).seconds == 5
    blocking = Step().collective(1, SECOND, blocking=True).kernel(1)
    assert played(blocking).seconds == 2


def test_a_collective_begins_after_the_work_on_its_stream():
    after = Step().kernel(3).collective(1, SECOND).kernel(1).wait(1)
    assert played(after).roles[0].communication[0].start == 3


def test_collectives_of_one_group_queue_and_those_of_two_do_not():
    queued = Step().collective(1, SECOND).collective(2, SECOND).wait(2)
    assert [span.start for span in played(queued).roles[0].communication] == [0, 1]
    # The link to the other host, and the one inside: each passes 1 byte in a second, after one of latency, and 10.
    two = Step(groups=((0, 2), (0, 1))).collective(1, 2, group=0).collective(2, SECOND, group=1).wait(1)
    assert [(span.start, span.end) for span in played(two).roles[0].communication] == [(0, 1), (0, 2)]


def beside(step):
    """Returns the start of the kernels on the second stream."""
    return next(run.start for run in played(step).roles[0].runs if run.stream == 1)


def test_an_event_orders_streams():
    step = Step().kernel(2).record(7).wait_event(7, stream=1).kernel(1, stream=1)
    assert beside(step) == 2
    assert beside(Step().kernel(2).wait_event(7, stream=1).kernel(1, stream=1)) == 0, "never recorded"


def test_an_event_recorded_again_means_the_later_point_only_for_later_waits():
    step = Step().kernel(1).record(7).wait_event(7, stream=1).kernel(1).record(7).kernel(5, stream=1)
    assert beside(step) == 1


def test_the_host_waits_for_events_streams_and_all():
    device = replace(PLAIN, launch_seconds=1.0)
    for wait in ({}, {"stream": 0}, {"event": 1}):
        step = Step().kernel(4).record(1).host_wait(**wait).kernel(1)
        assert played(step, device=device).seconds == 7, wait


def test_kernels_slow_down_while_communication_takes_a_share_of_the_device():
    device = replace(PLAIN, communication_sms=5)
    # For the first second half of the device is left, so half a second of work is done.
    assert played(Step().collective(1, SECOND).kernel(2).wait(1), device=device).seconds == 2.5


def test_communication_takes_its_share_of_the_device_while_it_waits_for_others():
    device = replace(PLAIN, communication_sms=5)
    late = Step(0).kernel(4).collective(1, SECOND).wait(1)
    early = Step(1).collective(1, SECOND).kernel(2).wait(1)
    result = played(late, early, classes=[0, 1, 0, 1], device=device)
    assert [run.end for run in result.roles[1].runs] == [4]
    assert result.seconds == 5


def test_streams_that_compute_at_once_share_the_device():
    assert played(Step().kernel(1, stream=1).kernel(2)).seconds == 3
    many = Step()
    for stream in range(4):
        many.kernel(2, stream=stream).kernel(1, stream=stream)
    result = played(many)
    assert [run.end for run in result.roles[0].runs] == [12] * 4, "each at a quarter of the speed"
    parts = result.roles[0].shares
    assert (parts.kernels["other"], parts.contention, parts.idle) == (1, 0, 0)
    # The second stream begins at 1 s, beside 3 s of the default stream. Both have half of the device for 2 s.
    late = played(Step().kernel(1).record(7).kernel(3).wait_event(7, stream=1).kernel(1, stream=1)).roles[0]
    assert sorted((run.stream, run.start, run.end) for run in late.runs) == [(0, 0, 1), (0, 1, 5), (1, 1, 3)]


def test_a_side_stream_loses_the_multiprocessors_of_communication_like_the_default_stream():
    device = replace(PLAIN, communication_sms=5)
    about = {"kind": "attention", "shape": (1, 1, 1, 1, 1), "flops": 1}
    alone = played(Step().kernel(0, **about)).seconds
    assert alone > 0.5
    for stream in (0, 1):
        step = Step().collective(1, SECOND, stream=stream).kernel(0, stream=stream, **about).wait(1, stream=stream)
        # Half a second of work is done in the second of the collective.
        assert played(step, device=device).seconds == pytest.approx(alone + 0.5), stream
    # Memory limits copies of FSDP2 on its side streams, with which the published steps were fitted.
    copies = Step().collective(1, SECOND, stream=1).kernel(2, stream=1).wait(1, stream=1)
    assert played(copies, device=device).seconds == 2


def test_kernels_that_are_not_launched_yet_slow_down_no_other_stream():
    device = replace(PLAIN, launch_seconds=1.0)
    # The side stream gets its kernels at 2 and 3 s, when the first one of the default stream has ended.
    role = played(Step().kernel(1).kernel(1, stream=1).kernel(1, stream=1), device=device).roles[0]
    assert [(run.stream, run.end) for run in role.runs] == [(0, 2), (1, 4)]
    assert role.shares.contention == 0


def test_roles_meet_in_a_collective():
    slow = Step(0).kernel(5).collective(1, SECOND).wait(1)
    fast = Step(1).kernel(1).collective(1, SECOND).wait(1).kernel(1)
    result = played(slow, fast, classes=[0, 1, 0, 1])
    assert result.seconds == 7
    assert result.roles[1].communication[0].ready == 1
    assert result.roles[1].communication[0].start == 5


def test_a_role_stands_for_its_class_in_a_group_of_other_ranks():
    # Ranks 0 and 2 are alike, and so are 1 and 3. Rank 3 was recorded with the group of 2 and 3.
    first = Step(0, groups=((0, 1),)).kernel(5).collective(1, SECOND).wait(1)
    last = Step(3, groups=((2, 3),)).collective(1, SECOND).wait(1)
    assert played(first, last, classes=[0, 3, 0, 3]).seconds == 6


def test_a_group_of_one_class_needs_no_other_role():
    first = Step(0, groups=((0, 2),)).collective(1, 2).wait(1)
    other = Step(1).kernel(1)
    # 1 byte between two hosts, after a second of latency.
    assert played(first, other, classes=[0, 1, 0, 1]).seconds == 2


def test_messages_between_roles_wait_for_both_sides():
    sender = Step(0).kernel(3).send(1, 1)
    receiver = Step(1).receive(1, 0).kernel(1)
    assert played(sender, receiver, classes=[0, 1, 0, 1]).seconds == 5


def test_a_message_to_a_rank_that_is_not_recorded_is_answered_by_its_class():
    # A ring of one class: each rank sends to the next and receives from the one before.
    step = Step(0, groups=((0, 1, 2, 3),)).send(1, 1, blocking=False).receive(2, 3, blocking=False).wait(1).wait(2)
    assert played(step).seconds == pytest.approx(max(1.0, 1 + 10))


def test_messages_of_a_batch_begin_together():
    # Each rank sends and receives 10 bytes of the other: one second inside a host, both ways at once.
    batch = [
        Step(0).send(1, 1, batch=0, blocking=False).receive(2, 1, batch=0, blocking=False).wait(1).wait(2),
        Step(1).send(1, 0, batch=0, blocking=False).receive(2, 0, batch=0, blocking=False).wait(1).wait(2),
    ]
    assert played(*batch, classes=[0, 1, 0, 1]).seconds == 1


def test_ranks_that_both_receive_first_are_in_a_deadlock_with_both_lines():
    first = Step(0).receive(1, 1).send(2, 1)
    second = Step(1).kernel(1).receive(1, 0).send(2, 0)
    with pytest.raises(DeadlockError) as raised:
        played(first, second, classes=[0, 1, 0, 1])
    assert "rank 0 at train.py:1 in receive from rank 1" in str(raised.value)
    assert "rank 1 at train.py:2 in receive from rank 0" in str(raised.value)


def test_groups_entered_in_different_orders_are_a_deadlock_if_the_stream_waits():
    groups = ((0, 1), (0, 1))
    first = Step(0, groups=groups).collective(1, 20, 0, blocking=True).collective(2, 20, 1, blocking=True)
    second = Step(1, groups=groups).collective(1, 20, 1, blocking=True).collective(2, 20, 0, blocking=True)
    with pytest.raises(DeadlockError, match=r"rank 0 at train.py:1 in all_gather of group g0 for rank 1"):
        played(first, second, classes=[0, 1, 0, 1])
    # On streams of their own both go on: the host has put both on the device.
    first = Step(0, groups=groups).collective(1, 20, 0, stream=1).collective(2, 20, 1, stream=2).wait(1).wait(2)
    second = Step(1, groups=groups).collective(1, 20, 1, stream=1).collective(2, 20, 0, stream=2).wait(1).wait(2)
    # Over one link, both take twice as long.
    assert played(first, second, classes=[0, 1, 0, 1]).seconds == 2


def test_a_missing_collective_is_a_deadlock():
    with pytest.raises(DeadlockError, match=r"rank 0 at train.py:2"):
        played(Step(0).kernel(1).collective(1, 20, blocking=True), Step(1).kernel(1), classes=[0, 1, 0, 1])


def test_a_device_that_is_the_host_computes_before_it_goes_on():
    device = replace(PLAIN, is_synchronous=True)
    step = Step().kernel(2).collective(1, SECOND).kernel(3).wait(1)
    assert played(step, device=device).seconds == 5
    slow = Step(0).kernel(4).collective(1, SECOND, blocking=True).kernel(1)
    fast = Step(1).collective(1, SECOND, blocking=True).kernel(1)
    assert played(slow, fast, classes=[0, 1, 0, 1], device=device).seconds == 6


def test_exposed_communication_is_by_group_and_line_and_counts_moments_once():
    step = Step(groups=((0, 1), (0, 1)))
    step.collective(1, 2 * SECOND, group=0).collective(2, 2 * SECOND, group=1).kernel(1).wait(1).wait(2).kernel(1)
    exposed = played(step).exposed
    assert sum(exposed.values()) == 3
    assert exposed.keys() <= {Exposed("g0", "train.py:1"), Exposed("g1", "train.py:2")}


def test_exposed_communication_is_that_of_the_rank_that_ends_last():
    short = Step(0, groups=((0, 1),)).kernel(1).collective(1, 3 * SECOND, blocking=True)
    long = Step(2, groups=((2, 3),)).kernel(5).collective(1, SECOND, blocking=True)
    result = played(short, long, classes=[0, 0, 2, 2])
    assert [sum(role.exposed.values()) for role in result.roles.values()] == [3, 1]
    assert sum(result.exposed.values()) == 1
    assert result.exposed_modules.keys() <= result.exposed.keys()
    assert result.slowest.shares.exposed * result.seconds == pytest.approx(1)


def test_time_in_which_another_role_is_late_is_not_communication():
    slow = Step(0).kernel(5).collective(1, SECOND).wait(1)
    fast = Step(1).kernel(1).collective(1, SECOND).wait(1)
    result = played(slow, fast, classes=[0, 1, 0, 1])
    assert sum(result.roles[1].exposed.values()) == 1


def test_a_timeline_knows_why_a_rank_of_a_pipeline_is_idle():
    # Rank 1 waits for 4 s until rank 0 sends, and a second for the message.
    first, second = Step(0).kernel(5).send(1, 1, 10), Step(1).kernel(1).receive(1, 0, 10).kernel(2)
    result = played(first, second, classes=[0, 1, 0, 1])
    timeline = result.timeline()
    assert timeline.idle[1] == (0, 4, 1, 0, 0)
    assert figures(timeline) == f"makespan 8 s, bubble {100 * result.bubble:.1f} %"
    assert timeline.idle[0].overhead == 0


def test_a_timeline_without_messages_has_no_bubble():
    timeline = played(Step().kernel(1).collective(1, SECOND, blocking=True).kernel(1)).timeline()
    assert timeline.idle[0] == (0, 0, 1, 0, 0)
    assert figures(timeline) == "makespan 3 s"


def test_a_timeline_has_kernels_beside_communication():
    step = Step().collective(1, SECOND).kernel(2, phase="forward").kernel(1, phase="backward").wait(1)
    result = played(step)
    timeline = result.timeline()
    assert [(str(span.step), span.start, span.end) for span in timeline.spans[0]] == [
        ("forward", 0, 2),
        ("backward", 2, 3),
    ]
    assert [(str(span.step), span.start, span.end) for span in timeline.beside[0][0]] == [("all_gather g0", 0, 1)]
    assert [span.duration for span in result.timeline(kernels=True).spans[0]] == [2, 1]


def test_scores_that_attention_computes_again_do_not_count_for_mfu():
    attention = {"kind": "attention", "shape": (1, 1, 1, 1, 1)}
    step = Step().kernel(1, flops=200, name="_scaled_dot_product_flash_attention", **attention)
    step.kernel(1, flops=500, name="_scaled_dot_product_flash_attention_backward", **attention)
    assert played(step).model_flops == 4 * 600  # of 4 ranks: the backward of two products is four of them


def test_flops_of_recomputation_do_not_count_for_mfu():
    step = Step(world_size=4).kernel(1, flops=1000).kernel(1, flops=1000, phase="recompute")
    assert played(step).mfu == pytest.approx(1000 / (played(step).seconds * 1000))


def test_a_thousand_ranks_are_played_as_their_roles():
    cluster = replace(LINKS, hosts=(8,) * 128)
    everyone = tuple(range(1024))
    roles = []
    for rank in range(0, 1024, 16):
        step = Step(rank, 1024, groups=(everyone, tuple(range(rank, rank + 16))))
        roles.append(step.kernel(1 + rank / 1024).collective(1, 1024, 1).wait(1).collective(2, 1024, 0).wait(2))
    classes = [rank - rank % 16 for rank in everyone]
    result = played(*roles, classes=classes, cluster=cluster)
    last = max(role.communication[0].end for role in result.roles.values())
    assert {role.communication[1].start for role in result.roles.values()} == {last}


def test_a_step_without_entries_takes_no_time():
    result = played(Step())
    assert (result.seconds, result.mfu, dict(result.exposed)) == (0, 0, {})
