import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.data_parallel.layout import MEBIBYTE, bucket_layout
from echelon.errors import InvalidArgument

PARAMETERS = st.lists(
    st.tuples(st.integers(0, 6 * MEBIBYTE), st.sampled_from(["float32 on cpu", "bfloat16 on cpu"])), max_size=30
)


def test_the_picture_in_the_docstring():
    sizes = [number * MEBIBYTE for number in (1, 1, 2, 2, 3, 3, 4, 4, 2)]
    layout = bucket_layout(sizes, ["float32"] * 9, bucket_mb=8, first_bucket_mb=2)
    assert [bucket.members for bucket in layout.buckets] == [(8,), (7, 6), (5, 4), (3, 2), (1, 0)]
    assert layout.homes() == ((4, 1), (4, 0), (3, 1), (3, 0), (2, 1), (2, 0), (1, 1), (1, 0), (0, 0))


def test_small_parameters_share_buckets_and_the_first_and_the_last_are_small():
    layout = bucket_layout([MEBIBYTE // 2] * 10, ["float32"] * 10, bucket_mb=2)
    assert [bucket.members for bucket in layout.buckets] == [(9, 8), (7, 6, 5, 4), (3, 2), (1, 0)]


def test_buckets_become_smaller_by_half_towards_the_end():
    layout = bucket_layout([MEBIBYTE // 2] * 40, ["float32"] * 40, bucket_mb=6)
    assert [bucket.num_bytes / MEBIBYTE for bucket in layout.buckets] == [1, 6, 6, 4, 2, 1]


def test_buckets_that_do_not_taper_are_full_to_the_end():
    layout = bucket_layout([MEBIBYTE // 2] * 40, ["float32"] * 40, bucket_mb=6, tapers=False)
    assert [len(bucket.members) for bucket in layout.buckets] == [2, 12, 12, 12, 2]


def test_what_is_left_before_the_buckets_that_become_smaller_is_one_of_its_own():
    layout = bucket_layout([MEBIBYTE // 2] * 46, ["float32"] * 46, bucket_mb=6)
    assert [bucket.num_bytes / MEBIBYTE for bucket in layout.buckets] == [1, 6, 6, 3, 4, 2, 1]


def test_nothing_smaller_than_the_first_bucket_is_cut_off_the_last():
    layout = bucket_layout([MEBIBYTE // 2] * 9, ["float32"] * 9, bucket_mb=2)
    assert [bucket.members for bucket in layout.buckets] == [(8, 7), (6, 5, 4, 3), (2, 1, 0)]


def test_only_the_last_bucket_of_all_is_small():
    layout = bucket_layout([MEBIBYTE // 2] * 10, list("aaaabbbbaa"), bucket_mb=4)
    assert [bucket.members for bucket in layout.buckets] == [(9, 8), (7, 6, 5, 4), (3, 2), (1, 0)]


def test_what_fills_no_bucket_stays_together():
    layout = bucket_layout([MEBIBYTE // 8] * 4, ["a"] * 4, bucket_mb=2)
    assert [bucket.members for bucket in layout.buckets] == [(3, 2, 1, 0)]


def test_a_bucket_has_one_kind_and_goes_when_its_last_parameter_is_there():
    layout = bucket_layout([4, 2, 4, 2, 4], ["a", "b", "a", "b", "b"], bucket_mb=25)
    assert str(layout) == "b 8 B: 4 3 1\na 8 B: 2 0"


def test_a_parameter_larger_than_the_bucket_fills_one():
    """An earlier system dropped it."""
    layout = bucket_layout([4, 40 * MEBIBYTE, 4, 40 * MEBIBYTE], ["a"] * 4, bucket_mb=25)
    assert [bucket.members for bucket in layout.buckets] == [(3,), (2, 1), (0,)]


def test_no_parameters_make_no_buckets():
    assert bucket_layout([], [], bucket_mb=25).buckets == ()


@given(PARAMETERS, st.floats(0.1, 8), st.floats(0.1, 2))
def test_every_layout_is_complete_ordered_and_bounded(parameters, bucket_mb, first_bucket_mb):
    sizes, kinds = [size for size, _ in parameters], [kind for _, kind in parameters]
    layout = bucket_layout(sizes, kinds, bucket_mb, first_bucket_mb)
    members = [member for bucket in layout.buckets for member in bucket.members]
    assert sorted(members) == list(range(len(sizes)))
    for number, bucket in enumerate(layout.buckets):
        assert list(bucket.members) == sorted(bucket.members, reverse=True)
        assert {kinds[member] for member in bucket.members} == {bucket.kind}
        assert bucket.num_bytes == sum(sizes[member] for member in bucket.members)
        assert bucket.num_bytes - sizes[bucket.members[-1]] < bucket_mb * MEBIBYTE or len(bucket.members) == 1
        assert all(layout.homes()[member][0] == number for member in bucket.members)
    full = [bucket.members[-1] for bucket in layout.buckets]
    assert full == sorted(full, reverse=True)
    if sizes:
        last = layout.buckets[layout.homes()[0][0]]
        limit = min(first_bucket_mb, bucket_mb) * MEBIBYTE
        rest = last.num_bytes - max(sizes[member] for member in last.members)
        assert rest < 2 * limit or first_bucket_mb >= bucket_mb
        first = layout.buckets[layout.homes()[len(sizes) - 1][0]]
        assert len(first.members) == 1 or first.num_bytes - sizes[first.members[-1]] < first_bucket_mb * MEBIBYTE


@given(PARAMETERS)
def test_only_the_last_bucket_of_a_kind_is_not_full(parameters):
    sizes, kinds = [size for size, _ in parameters], [kind for _, kind in parameters]
    layout = bucket_layout(sizes, kinds, bucket_mb=3, first_bucket_mb=3)
    for kind in set(kinds):
        mine = [bucket for bucket in layout.buckets if bucket.kind == kind]
        assert all(bucket.num_bytes >= 3 * MEBIBYTE for bucket in mine[:-1])


@pytest.mark.parametrize("bucket_mb", [0, -1, math.nan])
def test_a_size_that_cannot_be_is_refused(bucket_mb):
    with pytest.raises(InvalidArgument, match=r"bucket_mb=.*above 0"):
        bucket_layout([4], ["a"], bucket_mb)
