"""Communication that shares links, by both players. A NIC passes 1 byte in a second, links inside a host 10."""

from dataclasses import replace

import pytest

from echelon.foresight.play.cluster import Cluster
from echelon.foresight.play.collectives import cost_of
from echelon.foresight.play.links import Links
from echelon.foresight.play.player import play
from echelon.foresight.trace import Collective
from tests.helpers.traces import PLAIN, Step

HOSTS = Cluster(hosts=(4, 4), bandwidth=1.0, latency=0.0, local_bandwidth=10.0, local_latency=0.0)
CORES = replace(PLAIN, is_synchronous=True, cores=16)


def ends(*steps, classes, cluster=HOSTS, device=PLAIN):
    """Returns the ends of the communication of each role, in the order of the calls."""
    played = play({step.rank: step.trace() for step in steps}, classes, device, cluster)
    return [
        [round(span.end, 9) for span in sorted(role.communication, key=lambda span: span.entry)]
        for _, role in sorted(played.roles.items())
    ]


def pair(rank, *starts, num_bytes=4):
    """All-gathers of two ranks on two hosts, half of whose bytes pass a NIC, each in a group of its own."""
    step = Step(rank, 8, groups=[(rank % 4, rank % 4 + 4)] * len(starts))
    time = 0
    for number, start in enumerate(starts):
        if start > time:
            step.kernel(start - time)
        time = max(time, start)
        step.collective(number, num_bytes, group=number)
    return step


@pytest.mark.parametrize("device", [PLAIN, CORES], ids=["gpus", "processors"])
def test_two_all_gathers_over_one_nic_take_twice_as_long_and_over_two_they_do_not(device):
    assert ends(pair(0, 0), classes=[0] * 8, device=device) == [[2]]
    assert ends(pair(0, 0, 0), classes=[0] * 8, device=device) == [[4, 4]]
    beside = ends(pair(0, 0), pair(1, 0), classes=[0, 1, 0, 1] * 2, device=device)
    assert beside == [[2], [2]]


@pytest.mark.parametrize("device", [PLAIN, CORES], ids=["gpus", "processors"])
def test_a_link_is_shared_only_while_both_are_under_way(device):
    # Until 1 s the first has the NIC alone. Then each has a half of it, and its last second takes two.
    assert ends(pair(0, 0, 1), classes=[0] * 8, device=device) == [[3, 4]]


def test_a_gather_takes_one_direction_of_the_nic_of_its_root():
    # The root receives four parts of a byte by its NIC. It sends a message beside it at full speed, and receives none.
    nccl = replace(HOSTS, generation="hopper")
    call = Collective(0, 1, "gather", 0, 8, "float32", "", 0, True, (), (), "forward", -1, -1)
    links = Links(nccl, range(8))
    shares = {rank: list(links.shares(rank, call, cost_of(nccl, range(8), rank, call))) for rank in range(8)}
    found = {rank: [(link.kind, link.is_outward, round(share, 4)) for link, share in shares[rank]] for rank in shares}
    assert found[0] == [("local", False, 0.075), ("nic", False, 1)]
    assert found[1] == [("local", True, 0.025)]
    assert found[7] == [("nic", True, 0.25)]


def test_gathers_to_hosts_of_other_sizes_take_other_times():
    # Of 6000 bytes the ranks on the other host have 2000, or 4000.
    uneven = Cluster((4, 2), 1.0, 0.0, 10.0, 0.0, generation="hopper")
    step = Step(1, 6, groups=[range(6)])
    for number, root in enumerate((0, 5)):
        step.collective(number, 6000, kind="gather", root=root, blocking=True)
    played = play({1: step.trace()}, [1] * 6, PLAIN, uneven)
    assert [round(span.end - span.start) for span in played.roles[1].communication] == [2000, 4000]


def test_an_uplink_that_is_too_narrow_slows_down_all_groups_of_its_host():
    # Four groups of one class: four NICs of 1 byte, of which two bytes a second leave the host.
    half = replace(HOSTS, oversubscription=2.0)
    assert ends(pair(0, 0), classes=[0] * 8, cluster=half) == [[4]]
    # Two classes of two ranks each on a host: until 4 s all four share it, then those of the longer one have it.
    two = ends(pair(0, 0), pair(1, 0, num_bytes=8), classes=[0, 1, 0, 1] * 2, cluster=half)
    assert two == [[4], [6]]
    # A group of a single rank of each host fits.
    alone = ends(pair(0, 0), Step(1, 8, groups=()), classes=[0, 1, 1, 1] * 2, cluster=half)
    assert alone == [[2], []]


def test_links_inside_a_host_are_those_of_each_rank():
    both = Step(0, 8, groups=[(0, 1), (0, 1)]).collective(0, 20, group=0).collective(1, 20, group=1)
    assert ends(both, classes=[0] * 8) == [[2, 2]]
    # A group on the host and one to the other host share nothing.
    apart = Step(0, 8, groups=[(0, 1), (0, 4)]).collective(0, 20, group=0).collective(1, 4, group=1)
    assert ends(apart, classes=[0] * 8) == [[1, 2]]


def test_messages_take_one_direction():
    first = Step(0, 8).send(1, 4, 2, blocking=False).receive(2, 4, 2, blocking=False, batch=-1)
    second = Step(4, 8).receive(1, 0, 2, blocking=False).send(2, 0, 2, blocking=False)
    groups = [(0, 4), (0, 4)]
    for step in (first, second):
        step.groups = Step(0, 8, groups=groups).groups
        step.entries = [entry._replace(is_ordered=False) for entry in step.entries]
    assert ends(first, second, classes=[0, 0, 0, 0, 4, 4, 4, 4]) == [[2, 2], [2, 2]]
    # Two that leave by one NIC share it.
    both = [entry._replace(is_send=rank == 0) for rank, step in ((0, first), (4, second)) for entry in step.entries]
    first.entries, second.entries = both[:2], both[2:]
    assert ends(first, second, classes=[0, 0, 0, 0, 4, 4, 4, 4]) == [[4, 4], [4, 4]]


def test_with_rails_a_message_leaves_by_the_nic_on_the_rail_of_its_receiver():
    # Ranks 0 and 1 send to the first ranks of two other hosts, which are on the rail of rank 0.
    hosts = replace(HOSTS, hosts=(4, 4, 4), generation="hopper")
    sends = [Step(rank, 12, groups=[(rank, peer)]).send(1, peer, 2) for rank, peer in ((0, 4), (1, 8))]
    receives = [Step(rank, 12, groups=[(rank, peer)]).receive(1, peer, 2) for rank, peer in ((4, 0), (8, 1))]
    classes = [0, 1, 2, 2, 4, 2, 2, 2, 8, 2, 2, 2]
    for rails, seconds in ((0, 2), (4, 4)):
        found = ends(*sends, *receives, Step(2, 12), classes=classes, cluster=replace(hosts, rails=rails))
        assert [round(end, 2) for role in found for end in role] == [seconds] * 4
