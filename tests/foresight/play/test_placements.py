"""Groups of one role that lie on the hosts in different ways."""

from dataclasses import replace

import pytest

from echelon.foresight.play.cluster import Cluster
from echelon.foresight.play.placements import Placements
from echelon.foresight.play.player import play
from tests.helpers.traces import PLAIN, Step

HOSTS = Cluster(hosts=(8, 8, 8), bandwidth=1.0, latency=0.0, local_bandwidth=10.0, local_latency=0.0)
"""A NIC passes 1 byte in a second, links inside a host 10."""
UNEVEN = replace(HOSTS, hosts=(9, 8, 7))
CORES = replace(PLAIN, is_synchronous=True, cores=64)


def shifts(step, cluster=HOSTS, classes=None):
    trace = step.trace()
    found = Placements(cluster, classes or [step.rank] * cluster.world_size).shifts(trace, trace.entries[-1])
    return found.distances, found.is_complete


def of_group(*ranks, rank=0, **options):
    return shifts(Step(rank, 24, groups=[ranks]).collective(1, 60), **options)


@pytest.mark.parametrize(
    ("ranks", "distances"),
    [
        (range(6), (0, 6, 12, 18)),
        (range(4), (0, 4)),
        (range(8), (0,)),
        (range(0, 24, 6), (0, 1, 2, 3, 4, 5)),
        ((0, 1, 12, 13), (0, 2, 4, 6)),
        (range(24), (0,)),
    ],
    ids=["6 on hosts of 8", "4 on hosts of 8", "whole hosts", "across groups", "two axes", "all ranks"],
)
def test_groups_along_axes_of_a_mesh_count_once_for_each_way_to_lie_on_hosts(ranks, distances):
    assert of_group(*ranks) == (distances, True)


def test_on_hosts_of_different_sizes_each_group_counts():
    assert of_group(*range(4), cluster=UNEVEN) == ((0, 4, 8, 12, 16, 20), True)
    assert of_group(*range(4), cluster=replace(HOSTS, hosts=(24,))) == ((0,), True), "one host"
    assert of_group(*range(4), cluster=replace(HOSTS, hosts=(8, 8, 8, 4))) == ((0, 4), True), "a last one with fewer"


def test_a_rank_that_is_alone_of_its_role_has_the_same_place_in_each_group():
    # First and last stage of pipelines of three stages, in a group that is no axis of the mesh.
    classes = [0, 1, 2] * 8
    assert of_group(0, 2, classes=classes) == ((0, 3, 6, 9, 12, 15, 18, 21), True)


def test_groups_that_follow_no_axis_are_unknown_unless_they_have_all_ranks_of_the_role():
    assert of_group(0, 1, 3) == ((0,), False)
    assert of_group(0, 1, 3, classes=[0, 0, 4, 0, *[4] * 20]) == ((0,), True)
    # Of groups of another composition than the recorded one, none is known.
    assert of_group(*range(6), classes=[*[0] * 12, *[12] * 5, *[0] * 7]) == ((0, 6, 18), False)


def test_messages_go_as_far_on_each_rank_of_a_role():
    step = Step(1, 24, groups=[(0, 1, 2)]).send(1, 2)
    assert shifts(step, classes=[0, 1, 2] * 8) == ((0, 3, 6, 9, 12, 15, 18, 21), True)


@pytest.mark.parametrize("device", [PLAIN, CORES], ids=["gpus", "processors"])
def test_the_slowest_group_of_a_role_sets_its_time(device):
    step = Step(0, 24, groups=[range(6)]).collective(1, 60, blocking=True)
    # Five sixths of the bytes pass a link between hosts, as in the group of ranks 6 to 11.
    assert play({0: step.trace()}, [0] * 24, device, HOSTS).seconds == pytest.approx(50)
    aligned = Step(0, 24, groups=[range(4)]).collective(1, 40, blocking=True)
    assert play({0: aligned.trace()}, [0] * 24, device, HOSTS).seconds == pytest.approx(3)


def test_the_slowest_hop_of_a_stage_sets_the_time_of_its_message():
    # The pipeline of ranks 6 to 8 leaves its host between the last two, that of 15 to 17 between the first two. No one
    # pipeline has both, but a role has a single trace.
    first = Step(0, 24, groups=[(0, 1, 2)]).send(1, 1)
    middle = Step(1, 24, groups=[(0, 1, 2)]).receive(1, 0).send(2, 2)
    last = Step(2, 24, groups=[(0, 1, 2)]).receive(1, 1)
    traces = {step.rank: step.trace() for step in (first, middle, last)}
    found = play(traces, [0, 1, 2] * 8, PLAIN, HOSTS)
    assert found.seconds == 20
    assert found.assumptions == ()


def test_unknown_groups_are_an_assumption_with_the_group_and_its_line():
    step = Step(0, 24, groups=[(0, 1, 3)]).collective(1, 60)
    assert play({0: step.trace()}, [0] * 24, PLAIN, HOSTS).assumptions == (
        "all_gather of group g0 at train.py:1: the groups of all ranks that do the same as rank 0 lie on the hosts as "
        "ranks 0, 1, 3",
    )
