"""The collectives through shared memory give what plans over messages give, for all sizes and dtypes."""

import pytest

from tests.backends.shared import ranks


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_what_combines(pool, world_size):
    assert pool.run(ranks.check_reducing, world_size, backend="shm") == ["shm"] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_dtype(pool, world_size):
    pool.run(ranks.check_dtypes, world_size, backend="shm")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_what_moves(pool, world_size):
    pool.run(ranks.check_moving, world_size, backend="shm")
