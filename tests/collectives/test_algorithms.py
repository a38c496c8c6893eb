"""Every algorithm is proven by the checker, and costs what its formula says, for 1 to 33 ranks."""

import inspect
from fractions import Fraction

import pytest

from echelon.collectives.algorithms import OPERATIONS, algorithms_of, build, chunk_bytes, registry
from echelon.collectives.check import check
from echelon.collectives.cost import LinkCosts, simulate
from echelon.collectives.goal import goal_of
from echelon.collectives.plan import Send
from echelon.errors import InvalidRank, InvalidWorldSize, PlanError

ALL = [(operation, algorithm.name) for operation in OPERATIONS for algorithm in algorithms_of(operation)]
ROOTED = {"reduce", "broadcast", "gather", "scatter"}
NAMES = {
    "lg": lambda p: (p - 1).bit_length(),
    "floor_lg": lambda p: p.bit_length() - 1,
    "odd": lambda p: int(p & (p - 1) != 0),
    "bits": lambda p: sum(number.bit_count() for number in range(p)),
    "min": min,
}
"""What the formulas may use."""


def roots(operation: str, num_ranks: int) -> set[int]:
    return {0, num_ranks // 2, num_ranks - 1} if operation in ROOTED else {0}


@pytest.mark.parametrize(("operation", "name"), ALL)
def test_it_reaches_its_goal(operation, name):
    for num_ranks in range(1, 34):
        for root in roots(operation, num_ranks):
            plan = build(operation, name, num_ranks, root)
            check(plan, goal_of(operation, plan, root))


@pytest.mark.parametrize(("operation", "name"), ALL)
def test_it_costs_what_its_formula_says(operation, name):
    algorithm = registry.find(operation, name)
    for num_ranks in (*range(1, 14), 16, 24, 33):
        for root in roots(operation, num_ranks):
            plan = build(operation, name, num_ranks, root)
            n = 10 * num_ranks
            values = {**NAMES, "p": num_ranks, "n": n, "alpha": 7000, "beta": 300, "gamma": 10}
            timeline = simulate(plan, int(chunk_bytes(operation, plan, n)), LinkCosts(7000, 300, 10))
            assert timeline.makespan == eval(algorithm.cost, {}, values), (num_ranks, root)
            assert plan.num_rounds == eval(algorithm.rounds, {}, values), (num_ranks, root)


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


HOSTS = [
    (0,),
    (0, 0, 0),
    (0, 1, 2),
    (0, 0, 1, 1),
    (0, 1, 0, 1),
    (0, 0, 0, 1, 1, 1, 2, 2, 2),
    (0, 0, 0, 1),
    (0, 1, 1, 2, 2, 2, 2),
    ("b", "a", "b"),
    tuple(rank // 8 for rank in range(32)),
    tuple(rank // 8 for rank in range(33)),
]


@pytest.mark.parametrize("hosts", HOSTS)
def test_hierarchical_all_reduce_reaches_its_goal(hosts):
    plan = build("all_reduce", "hierarchical", len(hosts), hosts=hosts)
    check(plan, goal_of("all_reduce", plan))


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
    # Inside: 2 rounds of 2, n (k - 1) / k bytes; between: 2 rounds of 2, (n / k) (h - 1) / h bytes.
    costs = LinkCosts(1000, 10, 1, hosts=hosts, local_alpha=100, local_beta=2)
    expected = 4 * 100 + 2 * 90 * 2 + 90 + 4 * 1000 + 2 * 20 * 10 + 20
    assert simulate(plan, 120 // plan.num_chunks, costs).makespan == expected


def test_every_function_that_makes_a_plan_is_short_and_says_what_it_costs():
    makers = [value for value in vars(registry).values() if inspect.isfunction(inspect.unwrap(value))]
    makers = [inspect.unwrap(maker) for maker in makers if "algorithms." in maker.__module__]
    makers = [maker for maker in makers if not maker.__module__.endswith("registry")]
    assert len(makers) == 18
    for maker in makers:
        assert len(inspect.getsource(maker).splitlines()) <= 60
        assert "round" in (maker.__doc__ or "")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("all_gather_v", "ring", 2), PlanError, "no collective is called 'all_gather_v': choose from all_reduce, "),
        (
            ("all_reduce", "rings", 2),
            PlanError,
            "all_reduce has no algorithm 'rings': choose from ring, recursive_doubl",
        ),
        (("all_reduce", "ring", 0), InvalidWorldSize, "num_ranks=0"),
        (("broadcast", "binomial", 2, 2), InvalidRank, "root=2 is not a rank"),
        (("all_reduce", "hierarchical", 4), PlanError, "hierarchical: no hosts for 4 ranks"),
        (("all_reduce", "hierarchical", 4, 0, (0, 0)), PlanError, "hierarchical: 2 hosts for 4 ranks"),
        (("all_reduce", "ring", 2, 0, (0, 0)), PlanError, "all_reduce by ring looks at no hosts"),
    ],
)
def test_what_cannot_be_built(arguments, error, message):
    with pytest.raises(error, match=message):
        build(*arguments)
