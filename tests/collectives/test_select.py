import pytest
import torch

import echelon
from echelon.collectives.plans.algorithms import OPERATIONS, Algorithm, algorithms_of, build, numbered
from echelon.collectives.plans.plan import Plan, Recv, Reduce, Send
from echelon.collectives.plans.select import SIZED, STATIC, Rule, Selector, choose, parse
from echelon.errors import PlanError
from tests.helpers.collective_plans import layouts

HUGE = 2**50


def apart(num_ranks):
    return tuple(range(num_ranks))


def test_every_operation_has_an_algorithm_for_every_size_and_all_ranks():
    assert set(STATIC) == set(OPERATIONS)
    for operation, rules in STATIC.items():
        names = {algorithm.name for algorithm in algorithms_of(operation)}
        for num_bytes in (0, 1, 1024, 8192, 65536, 2**20, HUGE):
            for num_ranks in (1, 2, 3, 4, 8, 64):
                for hosts in layouts(num_ranks):
                    assert choose(operation, num_bytes, numbered(hosts)) in names
        assert operation in SIZED or all(
            rule == Rule(rule.algorithm, ranks=rule.ranks, where=rule.where) for rule in rules
        )


def test_small_all_reduces_take_few_rounds_and_large_ones_few_bytes():
    assert choose("all_reduce", 8, apart(8)) == "recursive_doubling"
    assert choose("all_reduce", HUGE, apart(8)) in ("ring", "rabenseifner")


@pytest.mark.parametrize("operation", ["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"])
@pytest.mark.parametrize(
    ("hosts", "go_by_hosts"),
    [((0,), False), ((0, 0), False), ((0, 1), False), ((0, 0, 1, 1), True), ((0, 1, 1, 0), True), ((0, 1, 2), False)],
)
def test_hosts_count_where_there_are_several_with_several_ranks_on_one(operation, hosts, go_by_hosts):
    for num_bytes in (0, 8, 2**20, HUGE):
        assert choose(operation, num_bytes, hosts).startswith("hierarchical") == go_by_hosts


def test_uneven_hosts_count_but_for_large_parts():
    uneven = (0, 0, 1)
    for operation in ("all_reduce", "reduce", "broadcast", "barrier"):
        assert choose(operation, HUGE, uneven).startswith("hierarchical")
    assert choose("all_gather", 0, uneven) == choose("reduce_scatter", HUGE, uneven) == "ring"
    assert choose("reduce_scatter", 8, uneven) == "hierarchical"


def test_rules_may_be_for_one_host_or_for_several():
    table = {"reduce": (Rule("hierarchical", where="several hosts"), Rule("binomial"))}
    table["all_reduce"] = (Rule("rabenseifner", where="several hosts"), Rule("ring", ranks=3, where="one host"))
    assert choose("reduce", 8, (0, 1), table=table) == "binomial"  # there is nothing inside of the hosts
    assert choose("reduce", 8, (0, 1, 0), table=table) == "hierarchical"
    assert choose("all_reduce", 8, (0, 0), table=table) == "recursive_doubling"
    assert choose("all_reduce", 8, (0, 0, 0), table=table) == "ring"
    assert choose("all_reduce", 8, (0, 1), table=table) == "rabenseifner"


def test_a_rule_applies_to_its_first_and_last_size_too():
    table = {"all_reduce": (Rule("ring", first=8, last=16), Rule("rabenseifner", last=100))}
    found = [choose("all_reduce", size, apart(2), table=table) for size in (7, 8, 16, 17, 100, 101)]
    assert found == ["rabenseifner", "ring", "ring", "rabenseifner", "rabenseifner", "recursive_doubling"]


def test_a_selector_remembers_its_plans():
    selector = Selector((0, 0, 1))
    first = selector.choose("broadcast", 8, 1, "")
    assert first.algorithm == "hierarchical"
    assert first.plan == build("broadcast", "hierarchical", 3, 1, (0, 0, 1))
    assert selector.choose("broadcast", 8, 1, "") is first
    assert selector.choose("broadcast", 8, 2, "").plan != first.plan
    assert selector.choose("broadcast", 8, 1, "binomial").algorithm == "binomial"


def test_the_user_overrules_the_table_size_by_size():
    text = "recursive_doubling:0-8192;rabenseifner:8193-max"
    assert [choose("all_reduce", size, apart(4), text) for size in (0, 8192, 8193, HUGE)] == [
        "recursive_doubling",
        "recursive_doubling",
        "rabenseifner",
        "rabenseifner",
    ]
    assert choose("all_reduce", 8, apart(2), " ring ") == "ring"
    assert choose("all_reduce", HUGE, apart(2), "rabenseifner:10-20") == choose("all_reduce", HUGE, apart(2))
    assert choose("all_to_all", 0, apart(2), "bruck") == "bruck"
    assert choose("all_reduce", 8, (0, 0), "hierarchical") == "hierarchical"


@pytest.mark.parametrize(
    ("operation", "text", "message"),
    [
        ("all_reduce", "tree", "ECHELON_ALL_REDUCE='tree': all_reduce has no algorithm 'tree': choose from ring, "),
        ("all_reduce", "ring:5", "ECHELON_ALL_REDUCE='ring:5' has sizes '5': write it as 'rabenseifner:0-8192;ring:"),
        ("all_reduce", "ring:9-5", "ECHELON_ALL_REDUCE='ring:9-5' has sizes '9-5': write it as "),
        ("all_reduce", "ring:0-x", "ECHELON_ALL_REDUCE='ring:0-x' has sizes '0-x': write it as "),
        ("all_reduce", " ; ", "ECHELON_ALL_REDUCE=' ; ' names no algorithm: write it as "),
        ("all_reduce", "ring:0-9;rabenseifner:9-max", "gives 9 bytes to two algorithms: write it as "),
        ("all_reduce", "ring;rabenseifner:9-max", "gives 9 bytes to two algorithms: write it as "),
        ("all_to_all", "hierarchical", "all_to_all has no algorithm 'hierarchical'"),
        ("reduce", "binomial:x", "has sizes 'x': write it as 'binomial'"),
        (
            "all_gather",
            "ring:0-9",
            "ECHELON_ALL_GATHER='ring:0-9' gives sizes, but in all_gather ranks may have tensors of different sizes: "
            "name one algorithm, such as 'ring'",
        ),
    ],
)
def test_what_cannot_be_read_is_an_error_of_one_line(operation, text, message):
    with pytest.raises(PlanError) as caught:
        choose(operation, 8, apart(2), text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rules_are_read_once():
    assert parse("all_reduce", "ring:0-9") is parse("all_reduce", "ring:0-9")


def star(hosts, _):
    """All ranks send to rank 0, which adds up and sends the sum to all."""
    others = range(1, len(hosts))
    center = (tuple(Reduce(rank, (0,)) for rank in others), tuple(Send(rank, (0,)) for rank in others))
    return Plan("star", 1, (center, *[((Send(0, (0,)),), (Recv(0, (0,)),)) for _ in others]))


STAR = {"all_reduce": (Rule(Algorithm("all_reduce", "star", star), last=64),)}


def reduce_by_a_star(group):
    own = group.subgroup(range(group.world_size), "own", STAR)
    return own.all_reduce(torch.full((4,), group.rank + 1.0)).tolist(), own.all_reduce(torch.ones(99)).sum().item()


@pytest.mark.parametrize("collectives", ["whole", "messages"])
def test_a_group_runs_an_algorithm_of_its_users(collectives):
    run = echelon.simulate(reduce_by_a_star, 3, collectives=collectives)
    assert run.results == [([6.0] * 4, 297.0)] * 3
    assert "by star" in run.trace


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        (Algorithm("all_reduce", "lossy", lambda hosts, _: Plan("lossy", 1, ((),) * len(hosts))), "lossy"),
        (Algorithm("all_reduce", "small", lambda hosts, _: star(hosts[1:], 0)), "2 ranks for all_reduce.*one of 3"),
        (Algorithm("reduce", "star", star), "3 ranks for reduce: all_reduce of"),
    ],
)
def test_a_wrong_plan_of_a_user_is_refused_before_it_runs(algorithm, problem):
    selector = Selector(apart(3), {"all_reduce": (Rule(algorithm),)})
    with pytest.raises(PlanError, match=problem):
        selector.choose("all_reduce", 8, 0, "")


def test_ranks_in_processes_run_an_algorithm_of_their_users(pool):
    assert pool.run(reduce_by_a_star, 3, backend="tcp") == [([6.0] * 4, 297.0)] * 3
