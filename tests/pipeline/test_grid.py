"""The grid of ranks x steps: whole where it is small, cut to what is marked where it is large."""

from echelon.pipeline.plan.action import Place
from echelon.pipeline.plan.check import grid, where

SMALL = (("a", "bb"), ("c",))


def test_a_small_grid_is_shown_whole():
    assert grid(SMALL).splitlines() == [
        "       0   1",
        "rank 0  a   bb",
        "rank 1  c",
    ]


def test_places_are_marked():
    assert grid(SMALL, {(0, 1), (1, 1)}).splitlines() == [
        "       0   1",
        "rank 0  a  >bb<",
        "rank 1  c  >?<",
    ]


def test_a_missing_step_is_after_the_last_one():
    assert grid(SMALL, {(0, 2)}).splitlines() == [
        "       0   1    2",
        "rank 0  a   bb  >?<",
        "rank 1  c",
    ]


def test_a_wide_grid_is_cut_around_the_places():
    orders = (tuple(range(100, 200)),)
    assert grid(orders, {(0, 50), (0, 52), (0, 90)}).splitlines() == [
        "       .. 47    48    49    50    51    52    53    54    55    .. 87    88    89    90    91    92    93",
        "rank 0 ..  147   148   149  >150<  151  >152<  153   154   155  ..  187   188   189  >190<  191   192   193",
    ]


def test_a_wide_grid_without_places_shows_its_start():
    assert grid((tuple(range(100)),)).splitlines()[0].split() == ["0", "1", "2", "3"]


def test_a_tall_grid_is_cut_around_the_places():
    lines = grid(tuple((rank,) for rank in range(100)), {(50, 0)}).splitlines()
    assert [line.split()[1] for line in lines[1:-1]] == [str(rank) for rank in range(47, 54)]
    assert lines[-1] == "(93 more ranks)"


def test_many_places_far_apart_do_not_fill_the_screen():
    orders = (tuple(range(1000)),)
    text = grid(orders, {(0, step) for step in range(0, 1000, 50)})
    assert len(text.splitlines()[0].replace("..", "").split()) <= 24


def test_a_step_with_its_place():
    assert where("2F0", Place(2, 3)) == "2F0 (rank 2, step 3)"
