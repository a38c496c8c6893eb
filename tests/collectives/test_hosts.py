"""Groups know which of their ranks share a host, and go by that."""

import os

import pytest
import torch

import echelon
from echelon.backends.simulated import SimulatedBackend
from echelon.collectives.plans.algorithms import find
from echelon.simulation.network import host_numbers
from tests.collectives.test_algorithms import NAMES
from tests.collectives.test_run import everything
from tests.helpers import forked_ranks
from tests.helpers.forked_ranks import run_forked

FAR, NEAR = (2.0**-10, 2.0**-20), (2.0**-14, 2.0**-24)
"""Latency and seconds per byte, between hosts and inside; powers of two, so that no sum is rounded."""
SIZES = [[1, 1], [4], [2, 2], [3, 1], [1, 2, 4], [4, 4], [8, 8, 8, 8], [8, 7], [1, 31]]
OPERATIONS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "barrier")


def network(sizes):
    return echelon.Network(FAR[0], 1 / FAR[1], sizes, NEAR[0], 1 / NEAR[1])


def all_of_them(group):
    sums = group.all_reduce(torch.arange(40.0) + group.rank).tolist()
    large = group.all_reduce(torch.full((20_000,), group.rank + 1.0))
    group.barrier()
    return {**everything(group), "all_reduce": sums, "large": large.unique().tolist()}


@pytest.mark.parametrize("sizes", SIZES)
def test_results_are_those_without_hosts(sizes):
    world_size = sum(sizes)
    found = echelon.simulate(all_of_them, world_size, network=network(sizes), collectives="messages", order="tcp")
    assert found.results == echelon.simulate(all_of_them, world_size, late_sends=True, order="tcp").results
    assert found.results[0]["large"] == [world_size * (world_size + 1) / 2]


def call(group, operation, num_bytes):
    if operation == "barrier":
        group.barrier()
    elif operation == "all_gather":
        group.all_gather(torch.ones(num_bytes // 4 // group.world_size))
    elif operation == "reduce":
        group.reduce(torch.ones(num_bytes // 4), 0)
    else:
        getattr(group, operation)(torch.ones(num_bytes // 4))


@pytest.mark.parametrize("num_bytes", [1 << 10, 1 << 20])
@pytest.mark.parametrize(("h", "k"), [(2, 2), (4, 2), (2, 8), (4, 4)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_over_hosts_collectives_take_the_time_of_their_formulas(operation, h, k, num_bytes):
    small = operation == "all_reduce" and num_bytes <= 64 << 10
    cost = find(operation, "hierarchical_doubling" if small else "hierarchical").cost
    values = {"alpha": FAR[0], "beta": FAR[1], "local_alpha": NEAR[0], "local_beta": NEAR[1], "gamma": 0}
    run = echelon.simulate(call, h * k, (operation, num_bytes), network=network([k] * h))
    expected = eval(cost, {}, {**NAMES, **values, "h": h, "k": k, "p": h * k, "n": num_bytes})
    counts = 8 * h * k * FAR[1] if operation == "all_gather" else 0  # how many rows each chunk of a message has
    assert expected <= run.elapsed <= expected + counts


@pytest.mark.parametrize("sizes", [[2, 2], [4, 4, 4, 4], [4, 3], [1, 2, 4]])
def test_where_the_network_is_slow_going_by_hosts_is_faster_than_rings(monkeypatch, sizes):
    is_even = len(set(sizes)) == 1
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        by_hosts = echelon.simulate(call, sum(sizes), (operation, 840 << 10), network=network(sizes)).elapsed
        monkeypatch.setenv(f"ECHELON_{operation.upper()}", "ring")
        by_ring = echelon.simulate(call, sum(sizes), (operation, 840 << 10), network=network(sizes)).elapsed
        monkeypatch.delenv(f"ECHELON_{operation.upper()}")
        assert by_hosts < by_ring if is_even or operation == "all_reduce" else by_hosts <= by_ring


def subgroups(group):
    found = []
    for ranks in ([0, 1], [2, 3], [0, 2], [1, 2, 3], [3, 1, 0]):
        part = group.subgroup(ranks)
        if part is not None:
            found.append((ranks, part.hosts, part.all_reduce(torch.tensor([group.rank])).item()))
    return found


def test_a_subgroup_has_the_hosts_of_its_ranks():
    expected = [
        ([0, 1], (0, 0), 1),
        ([2, 3], (0, 0), 5),
        ([0, 2], (0, 1), 2),
        ([1, 2, 3], (0, 1, 1), 6),
        ([3, 1, 0], (0, 1, 1), 4),
    ]
    results = echelon.simulate(subgroups, 4, network=network([2, 2])).results
    assert results == [[part for part in expected if rank in part[0]] for rank in range(4)]


def test_simulated_ranks_are_on_the_hosts_of_their_network():
    assert host_numbers(network([2, 1]), 3) == (0, 0, 1)
    assert host_numbers(None, 3) == host_numbers("10GbE", 3) == host_numbers(lambda *_: network([3]), 3) == (0, 1, 2)
    assert SimulatedBackend.create_group(3)[2].control.hosts == (0, 0, 0)


def sums_over(group):
    found = []
    for name in ("", "ring", "hierarchical"):
        os.environ["ECHELON_ALL_REDUCE"] = name
        found.append(group.all_reduce(torch.arange(50_000)).sum().item())
    del os.environ["ECHELON_ALL_REDUCE"]
    group.barrier()
    return [group.hosts, found]


def test_over_tcp_ranks_of_one_machine_share_a_host(monkeypatch):
    assert run_forked(sums_over, 3)[2] == [[0, 0, 0], [3 * sum(range(50_000))] * 3]
    monkeypatch.setattr(forked_ranks, "TcpBackend", forked_ranks.connect_as_if_elsewhere)
    for result in run_forked(sums_over, 3).values():
        assert result == [[0, 0, 1], [3 * sum(range(50_000))] * 3]
