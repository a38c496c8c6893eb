"""The layout of shards covers every element once, in equal parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.data_parallel.layout import Piece, pieces_between, shard_layout


def test_the_picture_in_the_docstring():
    assert shard_layout([5, 3], 2) == ((Piece(0, 0, 4),), (Piece(0, 4, 5), Piece(1, 0, 3)))


@given(st.lists(st.integers(0, 50), max_size=10), st.integers(1, 9))
def test_every_element_is_in_exactly_one_shard(sizes, num_shards):
    shards = shard_layout(sizes, num_shards)
    elements = [(p.parameter, i) for shard in shards for p in shard for i in range(p.start, p.stop)]
    assert elements == [(parameter, i) for parameter, size in enumerate(sizes) for i in range(size)]
    lengths = [sum(map(len, shard)) for shard in shards]
    assert len(shards) == num_shards
    assert max(lengths) - min(lengths) <= 1
    assert all(len(piece) > 0 for shard in shards for piece in shard)


@pytest.mark.parametrize("bounds", [(0, 0), (3, 3), (9, 12)])
def test_what_holds_nothing_has_no_pieces(bounds):
    assert pieces_between([2, 0, 7], *bounds) == ()
