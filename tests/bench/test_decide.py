"""From times to rules."""

from echelon.bench.tune import Timing, decide
from echelon.collectives.plans.select import ANY_SIZE, Rule, choose

PAIR, NESTED = (0, 0), (0, 0, 1, 1)


def sums(hosts, *times):
    """Returns timings of all-reduces: a size, the seconds by recursive doubling, and those by ring."""
    return [
        Timing("all_reduce", hosts, size, {"recursive_doubling": doubling, "ring": ring})
        for size, doubling, ring in times
    ]


def test_the_fastest_counts_for_the_sizes_up_to_half_way_to_the_next():
    table = decide(sums(PAIR, (8, 1, 2), (128, 1, 2), (2048, 4, 2), (1 << 20, 9, 3)))
    assert table == {
        "all_reduce": (
            Rule("recursive_doubling", 0, 512, 2, "one host"),
            Rule("ring", 513, ANY_SIZE, 2, "one host"),
        )
    }


def test_the_usual_is_kept_where_another_is_hardly_faster():
    assert choose("all_reduce", 8, PAIR) == "recursive_doubling"
    assert [rule.algorithm for rule in decide(sums(PAIR, (8, 1.04, 1)))["all_reduce"]] == ["recursive_doubling"]
    assert [rule.algorithm for rule in decide(sums(PAIR, (8, 1.06, 1)))["all_reduce"]] == ["ring"]


def test_what_is_best_for_one_size_between_two_others_is_chance():
    table = decide(sums(PAIR, (8, 1, 2), (64, 3, 2), (512, 1, 2), (4096, 1, 2)))
    assert table["all_reduce"] == (Rule("recursive_doubling", 0, ANY_SIZE, 2, "one host"),)
    at_an_end = decide(sums(PAIR, (8, 3, 2), (64, 1, 2)))["all_reduce"]
    assert [rule.algorithm for rule in at_an_end] == ["ring", "recursive_doubling"]


def test_where_sizes_are_not_known_one_algorithm_is_best_on_the_whole():
    def gathers(*times):
        return decide(
            Timing("all_gather", PAIR, 8**number, {"ring": ring, "recursive_doubling": doubling})
            for number, (ring, doubling) in enumerate(times)
        )["all_gather"]

    assert gathers((2, 1), (2, 1), (100, 150)) == (Rule("recursive_doubling", ranks=2, where="one host"),)
    assert gathers((2, 1), (100, 300)) == (Rule("ring", ranks=2, where="one host"),)


def test_rules_for_more_ranks_come_first():
    table = decide(sums(PAIR, (8, 1, 2)) + sums(NESTED, (8, 2, 1)))
    assert [(rule.algorithm, rule.ranks, rule.where) for rule in table["all_reduce"]] == [
        ("ring", 4, "several hosts"),
        ("recursive_doubling", 2, "one host"),
    ]
    for hosts, algorithm in (((0, 0), "recursive_doubling"), ((0,) * 9, "recursive_doubling"), (NESTED * 2, "ring")):
        assert choose("all_reduce", 8, hosts, table=table) == algorithm
