"""Every algorithm is proven by the checker, and costs what its formula says, for 1 to 33 ranks."""

import inspect
from fractions import Fraction

import pytest

from echelon.collectives.plans.algorithms import build, chunk_bytes, registry
from echelon.collectives.plans.check import check, goal_of
from echelon.collectives.plans.cost import LinkCosts, simulate
from echelon.collectives.plans.plan import Send
from echelon.errors import InvalidRank, InvalidWorldSize, PlanError
from tests.helpers.collective_plans import ALL, plans, roots

BY_HOSTS = [case for case in ALL if registry.find(*case).goes_by_hosts]


def ceil_lg(number):
    return (number - 1).bit_length()


NAMES = {
    "lg": ceil_lg,
    "floor_lg": lambda p: p.bit_length() - 1,
    "odd": lambda p: int(p & (p - 1) != 0),
    "bits": lambda p: sum(number.bit_count() for number in range(p)),
    "min": min,
}
"""What the formulas may use."""


FEW = (*range(1, 14), 16, 17)
MANY = sorted({*range(1, 34)} - {*FEW})


@pytest.mark.parametrize("sizes", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.parametrize(("operation", "name"), ALL)
def test_it_reaches_its_goal(operation, name, sizes):
    for num_ranks in sizes:
        for root in roots(operation, num_ranks):
            for plan in plans(operation, name, num_ranks, root):
                check(plan, goal_of(operation, plan, root))


@pytest.mark.parametrize(("operation", "name"), ALL)
def test_it_costs_what_its_formula_says(operation, name):
    algorithm = registry.find(operation, name)
    for num_ranks, hosts in LAYOUTS[algorithm.goes_by_hosts]:
        num_hosts = len(set(hosts))
        for root in roots(operation, num_ranks):
            plan = build(operation, name, num_ranks, root, hosts)
            n = 10 * num_ranks
            values = {**NAMES, "p": num_ranks, "n": n, "alpha": 7000, "beta": 300, "gamma": 10}
            values |= {"h": num_hosts, "k": num_ranks // num_hosts, "local_alpha": 900, "local_beta": 20}
            local = {"hosts": hosts, "local_alpha": 900, "local_beta": 20} if algorithm.goes_by_hosts else {}
            timeline = simulate(plan, int(chunk_bytes(operation, plan, n)), LinkCosts(7000, 300, 10, **local))
            assert timeline.makespan == eval(algorithm.cost, {}, values), (hosts, root)
            assert plan.num_rounds == eval(algorithm.rounds, {}, values), (hosts, root)


FLAT = [(num_ranks, tuple(range(num_ranks))) for num_ranks in (*range(1, 14), 16, 24, 33)]
SIZES = [(h, k) for h in (1, 2, 3, 4, 7, 8) for k in (1, 2, 3, 4, 8)]
EVEN = [(h * k, hosts) for h, k in SIZES for hosts in (tuple(r // k for r in range(h * k)), tuple(range(h)) * k)]
LAYOUTS = {False: FLAT, True: EVEN}


@pytest.mark.parametrize(("operation", "name"), BY_HOSTS)
def test_hosts_of_different_sizes_cost_at_most_twice_the_bytes_of_the_largest(operation, name):
    """The formulas are for hosts of one size; a rank more on one of them does not change the order of the cost."""
    for hosts in ((0, 0, 0, 1), (0, 1, 1, 1, 2), (0,) * 8 + (1,) * 7, tuple(rank // 8 for rank in range(33))):
        h, k = max(hosts) + 1, max(map(hosts.count, hosts))
        plan = build(operation, name, len(hosts), 0, hosts)
        n = 840
        costs = LinkCosts(7000, 300, 10, hosts, local_alpha=900, local_beta=20)
        most = 2 * ceil_lg(k) * (900 + n * 30) + 2 * (ceil_lg(h) + 1) * (7000 + n * 310)
        assert simulate(plan, chunk_bytes(operation, plan, n), costs).makespan <= most


def most_bytes_sent(plan):
    sent = (
        sum(len(step.chunks) for steps in program for step in steps if isinstance(step, Send))
        for program in plan.rounds
    )
    return Fraction(max(sent), plan.num_chunks)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 8, 33])
def test_bytes_on_the_wire(num_ranks):
    least = Fraction(num_ranks - 1, num_ranks)
    assert most_bytes_sent(build("all_reduce", "ring", num_ranks)) == 2 * least
    assert most_bytes_sent(build("all_reduce", "rabenseifner", num_ranks)) == 2 * least
    assert most_bytes_sent(build("reduce_scatter", "recursive_halving", num_ranks)) == least
    assert most_bytes_sent(build("all_gather", "recursive_doubling", num_ranks)) == least
    assert most_bytes_sent(build("scatter", "binomial", num_ranks)) == least


def test_hierarchical_all_reduce_sends_little_between_hosts():
    hosts = [rank // 4 for rank in range(12)]  # h = 3 hosts of k = 4 ranks
    plan = build("all_reduce", "hierarchical", 12, hosts=hosts)
    between = [
        sum(
            len(step.chunks)
            for steps in program
            for step in steps
            if isinstance(step, Send) and hosts[rank] != hosts[step.peer]
        )
        for rank, program in enumerate(plan.rounds)
    ]
    # 2 (n / k) (h - 1) / h bytes by each rank
    assert [Fraction(chunks, plan.num_chunks) for chunks in between] == [Fraction(2 * 2, 4 * 3)] * 12


def test_every_function_that_makes_a_plan_is_short_and_says_what_it_costs():
    makers = [value for value in vars(registry).values() if inspect.isfunction(inspect.unwrap(value))]
    makers = [inspect.unwrap(maker) for maker in makers if "algorithms." in maker.__module__]
    makers = [maker for maker in makers if not maker.__module__.endswith(("registry", "hosts"))]
    assert len(makers) == 24
    for maker in makers:
        assert len(inspect.getsource(maker).splitlines()) <= 60
        assert "round" in (maker.__doc__ or "")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            ("all_gather_v", "ring", 2),
            PlanError,
            "no collective is called 'all_gather_v': did you mean all_gather\\? There are all_reduce, ",
        ),
        (
            ("all_reduce", "rings", 2),
            PlanError,
            "all_reduce has no algorithm 'rings': did you mean ring\\? There are ring, recursive_doubl",
        ),
        (("all_reduce", "ring", 0), InvalidWorldSize, "num_ranks=0"),
        (("broadcast", "binomial", 2, 2), InvalidRank, "root=2 is not a rank"),
        (("all_reduce", "hierarchical", 4), PlanError, "hierarchical: no hosts for 4 ranks"),
        (("all_reduce", "hierarchical", 4, 0, (0, 0)), PlanError, "hierarchical: 2 hosts for 4 ranks"),
    ],
)
def test_what_cannot_be_built(arguments, error, message):
    with pytest.raises(error, match=message):
        build(*arguments)
