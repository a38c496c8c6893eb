"""Sizes and counts are those of nccl-tests."""

import pytest

from echelon.bench.request import Case, read_size, size_ladder
from echelon.errors import LaunchError


def test_a_case_has_whole_elements_and_at_least_one():
    whole = Case.of("all_reduce", 3, 1000)
    assert (whole.num_elements, whole.size) == (250, 1000)
    parts = Case.of("all_gather", 3, 1000)
    assert (parts.num_elements, parts.size) == (83, 996)
    least = Case.of("all_to_all", 3, 8, "float64", "sum", 0)
    assert (least.num_elements, least.size) == (1, 24)
    assert Case.of("barrier", 3, 8).size == 0


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("64K", 1 << 16), ("1M", 1 << 20), ("2 GiB", 2 << 30), ("3mb", 3 << 20), ("0", 0)]
)
def test_sizes_are_read(text, size):
    assert read_size("--min", text) == size


@pytest.mark.parametrize("text", ["", "x", "-8", "1.5M", "8 bits", "99999G"])
def test_what_is_no_size_is_an_error(text):
    with pytest.raises(LaunchError, match=r"--max .*give"):
        read_size("--max", text)


def test_sizes_grow_up_to_the_largest():
    assert size_ladder(8, 64, 2) == (8, 16, 32, 64)
    assert size_ladder(8, 100, 3) == (8, 24, 72)
    assert size_ladder(5, 5, 2) == (5,)


@pytest.mark.parametrize("arguments", [(0, 8, 2), (16, 8, 2)])
def test_sizes_that_never_come_are_an_error(arguments):
    with pytest.raises(LaunchError, match="give"):
        size_ladder(*arguments)
