"""The clock gives the textbook's formulas, exactly."""

from fractions import Fraction
from math import log2

import pytest

from echelon.collectives.plans.algorithms import build, chunk_bytes
from echelon.collectives.plans.cost import LinkCosts, simulate
from echelon.collectives.plans.plan import Plan
from echelon.errors import PlanError

ALPHA, BETA, GAMMA = Fraction(20), Fraction(1, 3), Fraction(1, 7)
COSTS = LinkCosts(ALPHA, BETA, GAMMA)
ANY = (2, 3, 4, 6, 7, 8, 16)
POWERS = (2, 4, 8, 16)

# p ranks, n bytes, lg p; of an all-to-all n counts a rank's part for itself
FORMULAS = [
    ("all_reduce", "ring", ANY, "2*(p-1)*alpha + 2*n*(p-1)/p*beta + n*(p-1)/p*gamma"),
    ("all_reduce", "rabenseifner", POWERS, "2*lg*alpha + 2*n*(p-1)/p*beta + n*(p-1)/p*gamma"),
    ("all_reduce", "recursive_doubling", POWERS, "lg*(alpha + n*beta + n*gamma)"),
    ("broadcast", "binomial", POWERS, "lg*(alpha + n*beta)"),
    ("broadcast", "scatter_all_gather", POWERS, "(lg + p - 1)*alpha + 2*n*(p-1)/p*beta"),
    ("reduce_scatter", "recursive_halving", POWERS, "lg*alpha + n*(p-1)/p*(beta + gamma)"),
    ("all_to_all", "pairwise", ANY, "(p-1)*alpha + n*(p-1)/p*beta"),
]


@pytest.mark.parametrize(("operation", "name", "sizes", "formula"), FORMULAS)
@pytest.mark.parametrize("num_bytes", [0, 1, 8, 1000, 2**20])
def test_published_formulas(operation, name, sizes, formula, num_bytes):
    for num_ranks in sizes:
        plan = build(operation, name, num_ranks)
        timeline = simulate(plan, chunk_bytes(operation, plan, num_bytes), COSTS)
        values = {"p": num_ranks, "n": Fraction(num_bytes), "lg": int(log2(num_ranks))}
        assert timeline.makespan == eval(formula, {}, {**values, "alpha": ALPHA, "beta": BETA, "gamma": GAMMA})


def test_one_message_at_a_time_leaves_a_rank_and_comes_to_it():
    plan = Plan.from_text("fan: 3 ranks, 3 chunks\nrank 0: 0>1 1>2\nrank 1: 0<0 2>2\nrank 2: 1<0 2<1")
    timeline = simulate(plan, 10, LinkCosts(alpha=1, beta=1))
    # 0 to 1 and 1 to 2 at once, then 0 to 2.
    assert [spans[0][1:] for spans in timeline.spans] == [(0, 22), (0, 11), (0, 22)]


def test_a_message_waits_until_its_receiver_comes_to_it():
    plan = Plan.from_text("later: 3 ranks, 1 chunks\nrank 0: +0<1 | +0<2\nrank 1: 0>0\nrank 2: 0>0")
    timeline = simulate(plan, 10, LinkCosts(alpha=1, beta=1, gamma=2))
    assert [span[1:] for span in timeline.spans[0]] == [(0, 31), (31, 62)]
    assert timeline.spans[2][0][1:] == (31, 42)


def test_ranks_that_both_send_first_are_not_stuck():
    plan = Plan.from_text("both: 2 ranks, 2 chunks\nrank 0: 0>1 | 1<1\nrank 1: 1>0 | 0<0")
    timeline = simulate(plan, 1, LinkCosts(alpha=5, beta=0))
    assert timeline.makespan == 10


def test_hosts_have_their_own_costs():
    plan = Plan.from_text("two hops: 3 ranks, 1 chunks\nrank 0: 0>1\nrank 1: 0<0 | 0>2\nrank 2: 0<1")
    costs = LinkCosts(alpha=100, beta=10, hosts=("a", "a", "b"), local_alpha=1, local_beta=2)
    assert simulate(plan, 3, costs).makespan == (1 + 2 * 3) + (100 + 10 * 3)


def test_a_cost_inside_a_host_that_is_not_given_is_the_one_between_hosts():
    hosts = ("a", "a")
    assert LinkCosts(alpha=100, beta=10, hosts=hosts, local_alpha=1).of_message(0, 1, 3) == 1 + 10 * 3
    assert LinkCosts(alpha=100, beta=10, hosts=hosts, local_beta=2).of_message(0, 1, 3) == 100 + 2 * 3


def test_the_timeline_tells_who_waited_for_whom():
    timeline = simulate(build("broadcast", "binomial", 4), 0, LinkCosts(alpha=1, beta=0))
    assert [[(span.name, span.start, span.end) for span in spans] for spans in timeline.spans] == [
        [("send [0>1]", 0, 1), ("send [0>2]", 1, 2)],
        [("receive [0<0]", 0, 1), ("send [0>3]", 1, 2)],
        [("receive [0<0]", 1, 2)],
        [("receive [0<1]", 1, 2)],
    ]
    assert [idle.warm_up for idle in timeline.idle] == [0, 0, 1, 1]
    assert [(critical.rank, critical.span.name) for critical in timeline.critical_path] == [
        (0, "send [0>1]"),
        (0, "send [0>2]"),
    ]


def test_the_critical_path_ends_for_every_algorithm():
    for name in ("ring", "recursive_doubling", "rabenseifner"):
        timeline = simulate(build("all_reduce", name, 7), 1, LinkCosts(1, 1, 1))
        assert timeline.critical_path[-1].span.end == timeline.end


def test_a_plan_that_cannot_end():
    plan = Plan.from_text("stuck: 2 ranks, 1 chunks\nrank 0: 0<1\nrank 1: .")
    with pytest.raises(PlanError, match="plan 'stuck': rank 0 waits for ever in round 0: check it"):
        simulate(plan, 1, LinkCosts(1, 1))
