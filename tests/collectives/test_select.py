import pytest

from echelon.collectives.algorithms import OPERATIONS, algorithms_of
from echelon.collectives.select import SIZED, TABLE, Rule, choose, parse
from echelon.errors import PlanError

HUGE = 2**50


def test_every_operation_has_an_algorithm_for_every_size_and_number_of_ranks():
    assert set(TABLE) == set(OPERATIONS)
    for operation, rules in TABLE.items():
        names = {algorithm.name for algorithm in algorithms_of(operation)}
        for num_bytes in (0, 1, 1024, 8192, 65536, 2**20, HUGE):
            for num_ranks in (1, 2, 3, 4, 8, 64):
                assert choose(operation, num_bytes, num_ranks) in names
        assert operation in SIZED or all(rule == Rule(rule.algorithm, ranks=rule.ranks) for rule in rules)


def test_small_all_reduces_take_few_rounds_and_large_ones_few_bytes():
    assert choose("all_reduce", 8, 8) == "recursive_doubling"
    assert choose("all_reduce", HUGE, 8) in ("ring", "rabenseifner")


def test_the_user_overrules_the_table_size_by_size():
    text = "recursive_doubling:0-8192;rabenseifner:8193-max"
    assert [choose("all_reduce", size, 4, text) for size in (0, 8192, 8193, HUGE)] == [
        "recursive_doubling",
        "recursive_doubling",
        "rabenseifner",
        "rabenseifner",
    ]
    assert choose("all_reduce", 8, 2, " ring ") == "ring"
    assert choose("all_reduce", HUGE, 2, "rabenseifner:10-20") == choose("all_reduce", HUGE, 2)
    assert choose("all_to_all", 0, 2, "bruck") == "bruck"


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
        ("all_reduce", "hierarchical", "all_reduce has no algorithm 'hierarchical'"),
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
        choose(operation, 8, 2, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rules_are_read_once():
    assert parse("all_reduce", "ring:0-9") is parse("all_reduce", "ring:0-9")
