"""Tuning on simulated ranks finds what the network favours; every rank ends with the same table."""

import pytest

import echelon
from echelon.bench.tune import tune
from echelon.collectives.plans.select import choose
from echelon.collectives.plans.tuning import from_text

SIZES = (8, 1 << 12, 1 << 20)


def found(group):
    lines = []
    text = tune(group, SIZES, 1, lines.append)
    return from_text(text, "text"), text, lines


def test_every_rank_ends_with_the_same_table_and_rank_0_tells():
    network = echelon.Network(latency=1e-3, bandwidth=1e8, hosts=(2, 2), local_latency=1e-6, local_bandwidth=1e10)
    results = echelon.simulate(found, 4, network=network).results
    table, text, lines = results[0]
    assert [result[:2] for result in results[1:]] == [(table, text)] * 3
    assert [result[2] for result in results[1:]] == [[]] * 3
    assert lines[0] == "inside a host: 1.001 us a message, 10 GB/s"
    assert lines[1] == "between hosts: 1000 us a message, 0.1 GB/s"
    assert lines[2].startswith("operation       ranks       bytes  us by algorithm")
    assert any(line.startswith("all_reduce          4     1048576  hierarchical ") for line in lines)
    assert max(len(each) for line in lines for each in line.splitlines()) <= 80
    nested, pair = (0, 0, 1, 1), (0, 0)
    assert choose("all_reduce", 1 << 20, nested, table=table) == "hierarchical"
    assert choose("barrier", 0, nested, table=table) == "hierarchical"
    assert choose("all_reduce", 8, pair, table=table) == "recursive_doubling"
    assert {rule.ranks for rule in table["all_reduce"]} == {2, 4}


def test_a_network_of_nothing_but_latency_favours_few_rounds():
    network = echelon.Network(latency=1e-3, bandwidth=float("inf"))
    table = echelon.simulate(found, 8, network=network).results[0][0]
    hosts = tuple(range(8))
    for operation, algorithm in (
        ("all_reduce", "recursive_doubling"),
        ("all_gather", "recursive_doubling"),
        ("reduce_scatter", "recursive_halving"),
        ("all_to_all", "bruck"),
        ("broadcast", "binomial"),
    ):
        assert choose(operation, 1 << 20, hosts, table=table) == algorithm


@pytest.mark.slow
def test_a_network_of_nothing_but_bandwidth_favours_few_bytes():
    network = echelon.Network(latency=0.0, bandwidth=1e9)
    table = echelon.simulate(found, 8, network=network).results[0][0]
    hosts = tuple(range(8))
    assert choose("all_reduce", 1 << 20, hosts, table=table) == "rabenseifner"
    assert choose("broadcast", 1 << 20, hosts, table=table) == "scatter_all_gather"
    assert choose("all_to_all", 1 << 20, hosts, table=table) == "pairwise"


def test_one_rank_has_nothing_to_tune():
    with pytest.raises(echelon.LaunchError, match="1 rank has nothing to tune; give -n 2 or more"):
        echelon.simulate(found, 1)
