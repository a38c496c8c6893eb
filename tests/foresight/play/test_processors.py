"""Steps of ranks that share the processors of their host, on the round numbers of test_player."""

from dataclasses import replace

import pytest

from echelon.errors import DeadlockError
from echelon.foresight.play.cluster import Cluster
from echelon.foresight.play.player import play
from tests.helpers.traces import PLAIN, Step

TWO_CORES = replace(PLAIN, is_synchronous=True, cores=2)
HOST = Cluster(hosts=(4,), bandwidth=1.0, latency=0.0, local_bandwidth=10.0, local_latency=0.0)
SECOND = 20
"""Bytes of an all-gather of two ranks that takes a second."""


def played(*steps, classes=(0, 1, 2, 3), device=TWO_CORES, cluster=HOST):
    return play({step.rank: step.trace() for step in steps}, classes, device, cluster)


def each(*seconds):
    return [Step(rank).kernel(amount) for rank, amount in enumerate(seconds)]


@pytest.mark.parametrize(
    ("seconds", "ends"),
    [
        ((3, 3, 0.01, 0.01), (3.01, 3.01, 0.02, 0.02)),
        ((3, 3, 3, 3), (6, 6, 6, 6)),
        # Until 2 s all four have half a processor, then two have one each.
        ((1, 1, 3, 3), (2, 2, 4, 4)),
        # Until 1.5 s three have two thirds of one.
        ((0.01, 1, 1, 4), (0.02, 1.51, 1.51, 4.51)),
    ],
)
def test_ranks_are_slowed_down_while_more_compute_than_there_are_processors(seconds, ends):
    result = played(*each(*seconds))
    assert [result.roles[rank].seconds for rank in range(4)] == pytest.approx(ends, abs=0.011)


def test_processor_time_is_as_much_as_the_kernels_take():
    result = played(*each(1, 2, 3, 4))
    assert result.seconds == pytest.approx(5.5)  # rank 3 alone for a second, at the end


def test_a_class_asks_for_a_processor_for_each_of_its_ranks():
    assert played(Step(0).kernel(3), classes=(0, 0, 0, 0)).seconds == 6
    two_hosts = replace(HOST, hosts=(2, 2))
    assert played(Step(0).kernel(3), classes=(0, 0, 0, 0), cluster=two_hosts).seconds == 3


def test_a_device_without_a_number_of_cores_shares_none():
    assert played(Step(0).kernel(3), classes=(0, 0, 0, 0), device=replace(TWO_CORES, cores=0)).seconds == 3


def test_a_collective_takes_a_processor_of_each_member():
    pair = replace(HOST, hosts=(2,))
    step = Step(0, world_size=2).collective(1, SECOND).kernel(3).wait(1)
    # Two ranks compute and communicate on two processors: 1 s of communication takes 2 s, beside 1 s of kernels.
    assert played(step, classes=(0, 0), cluster=pair).seconds == 4
    assert played(step, classes=(0, 0), cluster=pair, device=replace(TWO_CORES, cores=4)).seconds == 3


def test_a_rank_that_waits_leaves_its_processor_to_others():
    late = Step(0).kernel(4).collective(1, SECOND, blocking=True)
    early = Step(1).collective(1, SECOND, blocking=True)
    beside, idle = Step(2, groups=()).kernel(4), Step(3, groups=())
    assert played(late, early, beside, idle).roles[0].seconds == 5


def test_a_missing_collective_is_a_deadlock():
    missing = [Step(0).kernel(1).collective(1, SECOND, blocking=True), Step(1).kernel(1)]
    missing += [Step(rank, groups=()).kernel(1) for rank in (2, 3)]
    with pytest.raises(DeadlockError, match=r"rank 0 at train.py:2 in all_gather of group g0 for rank 1"):
        played(*missing)


def test_a_stream_beside_the_default_one_waits_without_the_host():
    beside = Step(0).collective(1, SECOND, stream=1).wait(1, stream=1).record(7, stream=1)
    pair, cores = replace(HOST, hosts=(2,)), replace(TWO_CORES, cores=4)
    hidden = played(beside.kernel(3).wait_event(7).kernel(1), classes=(0, 0), cluster=pair, device=cores)
    assert hidden.seconds == 4
    at_once = Step(0).collective(1, SECOND, stream=1).wait(1, stream=1).record(7, stream=1).wait_event(7).kernel(3)
    assert played(at_once, classes=(0, 0), cluster=pair, device=cores).seconds == 4


def test_a_rank_that_waits_for_a_late_one_has_a_bubble():
    late = Step(0).kernel(4).send(1, 1)
    early = Step(1).receive(1, 0).kernel(4)
    result = played(late, early, Step(2, groups=()), Step(3, groups=()))
    assert result.roles[1].waiting == 4
    assert result.seconds == 4 + 1 + 4
    assert result.bubble == pytest.approx((5 + 4 + 9 + 9 - 1) / (4 * 9), abs=0.03)
