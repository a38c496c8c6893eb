"""Tensors in memory that all ranks of a group share."""

import pytest
import torch

import echelon
from tests.helpers import shared_memory_checks
from tests.helpers.forked_ranks import run_forked


@pytest.mark.parametrize("world_size", [2, 3])
def test_operations_on_shared_tensors(pool, world_size):
    pool.run(shared_memory_checks.check_symmetric, world_size, backend="shm")


@pytest.mark.slow
def test_on_other_backends_it_is_ordinary_memory(pool):
    pool.run(shared_memory_checks.check_symmetric, 2, backend="tcp")
    pool.run(shared_memory_checks.check_symmetric, 1)
    echelon.simulate(shared_memory_checks.check_symmetric, 2)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_ranks_may_pass_different_kinds_of_tensors(pool, backend):
    pool.run(shared_memory_checks.check_mixed, 3, backend=backend)


@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_is_copied_twice(world_size):
    run_forked(shared_memory_checks.check_nothing_is_copied_twice, world_size, backend="shm")


def test_a_rank_may_have_let_go_of_a_block():
    assert set(run_forked(shared_memory_checks.go_on_without_a_block, 3, backend="shm").values()) == {10}


def test_memory_is_given_back_when_nothing_refers_to_the_tensor():
    for rank, (before, during, still, after) in run_forked(shared_memory_checks.check_freed, 2, backend="shm").items():
        assert during >= before + (16 << 10)
        assert after <= before + 1024
        assert (still >= before + (16 << 10)) == (rank == 0)


def test_a_forked_child_does_not_give_back_its_parents_memory():
    assert set(run_forked(shared_memory_checks.drop_in_a_child, 2, backend="shm").values()) == {3.0 * (1 << 18)}


def test_a_tensor_outlives_its_group():
    assert set(run_forked(shared_memory_checks.keep_after_close, 2, backend="shm").values()) == {4.0 * (1 << 18)}


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_ranks_that_disagree_on_the_shape_are_told(pool, backend):
    """Over TCP no rank waits for another here, so the rank that closes last is told."""
    if backend == "shm":
        texts = pool.run(shared_memory_checks.disagree_on_shape, 2, backend=backend)
    else:
        with pytest.raises(echelon.CollectiveMismatch) as caught:
            pool.run(shared_memory_checks.close_in_turn, 2, backend=backend)
        texts = [str(caught.value)]
    assert all("empty of float32[100], #1" in text and "empty of float32[101], #1" in text for text in texts)


def test_the_default_dtype_is_torchs():
    results = echelon.simulate(lambda group: group.empty(3).dtype, 2).results
    assert results == [torch.get_default_dtype()] * 2
