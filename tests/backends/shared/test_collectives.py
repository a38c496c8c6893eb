"""The collectives through shared memory give what plans over messages give, for all sizes and dtypes."""

import pytest

from tests.helpers import shared_memory_checks
from tests.helpers.forked_ranks import run_forked


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_what_combines(pool, world_size):
    assert pool.run(shared_memory_checks.check_reducing, world_size, backend="shm") == ["shm"] * world_size


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_dtype(pool, world_size):
    pool.run(shared_memory_checks.check_dtypes, world_size, backend="shm")


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_what_moves(pool, world_size):
    pool.run(shared_memory_checks.check_moving, world_size, backend="shm")


@pytest.mark.parametrize("world_size", [2, 3])
def test_up_to_1_mib_takes_no_slots(world_size):
    run_forked(shared_memory_checks.check_what_stands_beside_the_announcement, world_size, backend="shm")


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_out_may_be_of_the_same_storage(pool, backend):
    pool.run(shared_memory_checks.check_out_beside_the_input, 3, backend=backend)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_a_rank_has_for_itself_is_not_shown(pool, world_size):
    pool.run(shared_memory_checks.check_own_blocks_stay, world_size, backend="shm")


def test_memory_of_a_group_is_given_back_when_all_ranks_have_dropped_it():
    growth = run_forked(shared_memory_checks.check_dropped_groups, 3, backend="shm")
    assert max(growth.values()) <= 1 << 16


def test_a_rank_that_shows_more_bytes_than_its_rows_have_is_refused():
    for text in run_forked(shared_memory_checks.show_more_than_there_is, 2, backend="shm").values():
        assert "rank 1 of the group published 40 bytes" in text
