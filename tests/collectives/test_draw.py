from echelon.collectives.plans.algorithms import build
from echelon.collectives.plans.plan import grid, legend

HALVING = """\
        0          1
rank 0  2>2 +0<1   1>1 +0<2
rank 1  0>0 +1<2   2>2 +1<0
rank 2  1>1 +2<0   0>0 +2<1"""


def test_a_grid_has_a_row_per_rank_and_a_column_per_round():
    plan = build("reduce_scatter", "recursive_halving", 3)
    assert [line.split() for line in grid(plan).splitlines()] == [line.split() for line in HALVING.splitlines()]


def test_a_grid_is_cut_to_the_width():
    plan = build("all_reduce", "ring", 4)
    lines = grid(plan, 40).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[-1] == "(3 more rounds)"
    assert len(grid(plan, 1).splitlines()) == 6, "one round is always shown"


def test_only_some_of_many_ranks_are_shown():
    lines = grid(build("barrier", "dissemination", 100)).splitlines()
    assert len(lines) == 66
    assert lines[-1] == "(36 more ranks)"


def test_the_legend_has_the_signs_that_occur():
    assert legend(build("barrier", "dissemination", 2)) == ("0>1 sends chunk 0 to rank 1   0<1 receives it from rank 1")
    assert "0<1+ combines: received, own" in legend(build("all_reduce", "recursive_doubling", 2))
    assert "4=0 copies chunk 0 as 4" in legend(build("all_to_all", "bruck", 2))
