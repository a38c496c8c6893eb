"""Times of collectives and messages, by hand, and the switches of NCCL's protocols."""

from dataclasses import replace

import pytest

from echelon.errors import EchelonError, LaunchError
from echelon.foresight.networks import cluster_of
from echelon.foresight.play.cluster import Cluster, Placement, hosts_of
from echelon.foresight.play.collectives import KINDS, collective_cost, cost_of, message_cost
from echelon.foresight.play.devices import DEVICES
from echelon.foresight.trace import Collective
from echelon.simulation.network import Network
from tests.helpers.traces import LINKS

GIB = 1 << 30
H100 = cluster_of("infiniband-400g", DEVICES["h100"], 64)


def cost(kind, num_bytes, ranks=range(8), cluster=H100):
    return collective_cost(cluster, kind, cluster.placement(tuple(ranks)), num_bytes)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        # Two hosts of two: latency 1, a byte per second, 100 bytes. The smaller of ring and tree.
        ("all_gather", min(3 * (1 + 25), 2 * 1 + 75)),
        ("reduce_scatter", min(3 * (1 + 25), 2 * 1 + 75)),
        ("all_reduce", min(6 * (1 + 25), 2 * (1 + 100))),
        ("broadcast", min(2 * (1 + 100), (2 + 3) * 1 + 2 * 75)),
        # 50 bytes to the two ranks of the other host, and a latency for each other rank.
        ("all_to_all", 3 * 1 + 50),
        ("barrier", 2 * (1 + 4)),
    ],
)
def test_collectives_without_nccl_by_their_closed_forms(kind, seconds):
    assert collective_cost(LINKS, kind, Placement(4, 2, 2, 2), 100).seconds == pytest.approx(seconds)


def test_inside_a_host_its_links_count():
    assert cost("all_gather", 40, range(2), LINKS).seconds == pytest.approx(20 / 10)
    assert cost("all_gather", 40, (0, 2), LINKS).seconds == pytest.approx(1 + 20)


def test_an_nccl_ring_by_hand():
    # 8 ranks of one host, Simple: 8.4 us, 7 steps of 3.4 us, 7/8 of a GiB at 350 GB/s.
    found = cost("all_gather", GIB)
    assert found.seconds == pytest.approx(8.4e-6 + 7 * 3.4e-6 + GIB * 7 / 8 / 350e9)
    assert (found.algorithm, found.protocol) == ("ring", "Simple")
    both = cost("all_reduce", GIB)
    assert both.seconds == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 2 * GIB * 7 / 8 / 350e9)


def test_a_ring_between_hosts_by_hand():
    # 64 ranks on 8 hosts: 56 steps inside, 7 between; 8 NICs of 47 GB/s are faster than the links inside.
    found = cost("reduce_scatter", GIB, range(64))
    latency = 8.4e-6 + 56 * 3.4e-6 + 7 * (14e-6 + 2e-6)
    assert found.seconds == pytest.approx(latency + GIB * 63 / 64 / 350e9)
    # One rank of each host uses one NIC. All latencies are then those of the network.
    found = cost("all_gather", GIB, range(0, 64, 8))
    assert found.seconds == pytest.approx(8.4e-6 + 7 * (14e-6 + 2e-6) + GIB * 7 / 8 / 47e9)


def test_protocols_switch_with_the_size():
    protocols = [cost("all_gather", 1 << power).protocol for power in range(8, 31)]
    assert list(dict.fromkeys(protocols)) == ["LL", "LL128", "Simple"]


def test_a_tree_reduces_small_arrays_of_many_hosts():
    assert cost("all_reduce", 1 << 16, range(64)).algorithm == "tree"
    assert cost("all_reduce", 8 * GIB, range(64)).algorithm == "ring"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "barrier"])
@pytest.mark.parametrize("cluster", [H100, LINKS], ids=["nccl", "plain"])
def test_more_bytes_take_longer(kind, cluster):
    ranks = range(cluster.world_size)
    seconds = [cost(kind, 1 << power, ranks, cluster).seconds for power in range(4, 34, 3)]
    assert seconds == sorted(set(seconds))


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_takes_no_time(kind):
    assert cost(kind, GIB, [3]).seconds == 0


def test_an_all_to_all_uses_both_kinds_of_links_at_once():
    # 64 ranks: 56 of 64 parts leave the host by the rank's own NIC.
    found = cost("all_to_all", GIB, range(64))
    assert found.seconds == pytest.approx(8.4e-6 + 14e-6 + 2e-6 + GIB * 56 / 64 / 47e9)


def test_an_all_to_all_takes_as_long_as_a_rank_of_the_smallest_host():
    # 12 ranks on hosts of 8 and 4: one of the 4 sends 8 of 12 parts by its NIC. Within a host of 8 it is 7 parts.
    uneven = cluster_of("infiniband-400g", DEVICES["h100"], 12, [8, 4])
    found = cost("all_to_all", GIB, range(12), uneven)
    assert found.seconds == pytest.approx(8.4e-6 + 14e-6 + 2e-6 + GIB * 8 / 12 / 47e9)
    fast = replace(uneven, bandwidth=1e15)
    found = cost("all_to_all", GIB, range(12), fast)
    assert found.seconds == pytest.approx(8.4e-6 + 14e-6 + 2e-6 + GIB * 7 / 12 / 350e9)


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_a_gather_passes_the_one_nic_of_its_root(kind):
    # Of 12 ranks 8 are on the root's host, or 4.
    uneven = cluster_of("infiniband-400g", DEVICES["h100"], 12, [8, 4])
    for root, remote in ((0, 4), (11, 8)):
        call = Collective(0, 1, kind, 0, GIB, "float32", "", root, True, (), (), "forward", -1, -1)
        costs = [cost_of(uneven, range(12), rank, call) for rank in range(12)]
        assert {each.seconds for each in costs} == {costs[root].seconds}
        assert costs[root].seconds == pytest.approx(8.4e-6 + 14e-6 + 2e-6 + GIB * remote / 12 / 47e9)
        assert costs[root].nic == pytest.approx(1, rel=1e-2)
        # The NICs of members elsewhere pass one part, and the others none.
        shares = sorted({round(each.nic * remote, 2) for rank, each in enumerate(costs) if rank != root})
        assert shares == [0, round(costs[root].nic, 2)]


def test_oversubscription_narrows_the_uplink_of_a_host():
    narrow = replace(H100, oversubscription=4.0)
    # Alone, a group with a member on each host has its NIC. One of all ranks has a quarter of 8 NICs.
    assert cost("all_gather", GIB, range(0, 64, 8), narrow).seconds == cost("all_gather", GIB, range(0, 64, 8)).seconds
    latency = 8.4e-6 + 56 * 3.4e-6 + 7 * (14e-6 + 2e-6)
    assert cost("all_gather", GIB, range(64), narrow).seconds == pytest.approx(latency + GIB * 63 / 64 / 94e9)
    assert cost("all_gather", GIB, range(8), narrow) == cost("all_gather", GIB, range(8))


@pytest.mark.parametrize(
    ("group", "num_bytes", "channels"),
    [((0, 7), 1 << 20, 16), (range(8), 1 << 20, 4), (range(8), 96 << 20, 8), ((0, 7, 8), 96 << 20, 4)],
)
def test_a_message_inside_a_host_has_the_channels_of_its_communicator(group, num_bytes, channels):
    # 24 channels make 350 GB/s. Between hosts NCCL opens a channel for each 14 GB/s of a NIC.
    found = message_cost(H100, 0, 7, num_bytes, tuple(group))
    assert found.seconds == pytest.approx(8.4e-6 + 3.4e-6 + num_bytes / (350e9 * channels / 24))
    assert found.blocks == channels / 24


def test_messages_inside_and_between_hosts():
    assert message_cost(H100, 0, 7, 350e9).seconds == pytest.approx(1 + 8.4e-6 + 3.4e-6)
    assert message_cost(H100, 0, 8, 47e9).seconds == pytest.approx(1 + 8.4e-6 + 14e-6 + 2e-6)
    # Between rails, a hop inside the host comes first.
    rails = replace(H100, rails=8)
    assert message_cost(rails, 0, 8, 0).seconds == message_cost(H100, 0, 8, 0).seconds
    assert message_cost(rails, 0, 9, 0).seconds == pytest.approx(message_cost(H100, 0, 9, 0).seconds + 3.4e-6)
    assert message_cost(LINKS, 0, 1, 30).seconds == 3
    assert message_cost(LINKS, 1, 2, 30).seconds == 31


def test_a_kind_without_formula_is_refused():
    with pytest.raises(EchelonError, match=r"'gossip'.*all_reduce"):
        cost("gossip", 1)


def test_hosts_are_a_number_or_a_list_or_as_many_as_needed():
    assert hosts_of(16, 2, 8) == (8, 8)
    assert hosts_of(12, None, 8) == (8, 4)
    assert hosts_of(12, [4, 8], 8) == (4, 8)
    cluster = cluster_of(Network(hosts=[4, 12]), DEVICES["h100"], 16)
    assert cluster.placement(range(3, 6)) == (3, 2, 1, 2)
    assert [cluster.host_of(rank) for rank in (0, 3, 4, 15)] == [0, 0, 1, 1]


@pytest.mark.parametrize("hosts", [5, [4, 4], [], 0, "2", [0, 16]])
def test_hosts_that_do_not_have_the_ranks_are_refused(hosts):
    with pytest.raises(LaunchError, match="hosts="):
        hosts_of(16, hosts, 8)


def test_numbers_of_hosts_that_fit_are_named():
    with pytest.raises(LaunchError, match="give a divisor, such as 6 or 10, or the ranks of each host"):
        hosts_of(60, 8, 8)
    with pytest.raises(LaunchError, match=r"or the ranks of each host, as hosts=\[4, 3, 3\]$"):
        hosts_of(10, 3, 8)
    with pytest.raises(LaunchError, match=r"or the ranks of each host$"):
        hosts_of(2, 3, 8)


@pytest.mark.parametrize(
    "change",
    [
        {"bandwidth": 0},
        {"latency": -1},
        {"local_bandwidth": -1},
        {"oversubscription": 0.5},
        {"rails": -1},
        {"hosts": ()},
    ],
    ids=str,
)
def test_impossible_clusters_are_refused(change):
    with pytest.raises(LaunchError, match=next(iter(change))):
        replace(LINKS, **change)


def test_an_unknown_network_names_those_that_are_known():
    with pytest.raises(LaunchError, match=r"infiniband-400g"):
        cluster_of("infiniband", DEVICES["h100"], 8)


def test_a_device_without_nccl_has_the_links_of_the_network():
    cluster = cluster_of("shared-memory", DEVICES["cpu"], 4)
    assert cluster == Cluster((4,), 10e9, 1e-6, 1e10, 1e-6)


def test_measured_links_are_found_by_a_name_in_any_case():
    device = replace(DEVICES["cpu"], links={"10GbE": {"all_reduce 2": ((8.0, 1e-5), (64.0, 2e-5))}})
    cluster = cluster_of("10gbe", device, 4)
    assert cluster.links
    assert cluster == cluster_of("10GbE", device, 4)
