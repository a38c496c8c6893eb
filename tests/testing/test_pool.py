"""What happens to a job, and to the workers that run it. `spawn` runs its jobs the same way."""

import os
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from echelon.errors import InvalidWorldSize, LaunchError, PeerFailed, Timeout
from echelon.launch.variables import threads_per_rank
from echelon.testing import RankPool
from tests.helpers import rank_functions


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_runs_the_function_in_a_group_of_its_own(pool, world_size):
    assert pool.run(rank_functions.who, world_size) == [(rank, world_size) for rank in range(world_size)]


def test_tensors_come_back(pool):
    for result in pool.run(rank_functions.total, 2, 2.0):
        assert torch.equal(result, torch.full((3,), 6.0))
    assert pool.run(rank_functions.large, 1)[0].sum() == 1 << 22


def test_a_worker_is_the_same_process_from_one_job_to_the_next(pool):
    first = pool.run(rank_functions.pid, 2)
    assert pool.run(rank_functions.pid, 2) == first
    assert os.getpid() not in first


def test_init_returns_the_group_that_the_function_was_given(pool):
    assert pool.run(rank_functions.init_again, 2) == [True, True]
    with pytest.raises(LaunchError, match="started with 'tcp'"):
        pool.run(rank_functions.init_other_backend, 1)


def test_the_cores_are_shared_out(pool, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert pool.run(rank_functions.num_threads, 1) == [threads_per_rank(1)]
    assert pool.run(rank_functions.num_threads, 2) == [threads_per_rank(2)] * 2


def test_what_was_sent_arrives_though_the_sender_has_left(pool):
    assert pool.run(rank_functions.left_open, 2)[1] == sum(range(1 << 20))


def test_the_exception_of_the_failing_rank_is_raised_and_not_a_survivors(pool):
    with pytest.raises(KeyError, match="rank 1 has no key") as caught:
        pool.run(rank_functions.raise_on, 3, 1)
    first, others = caught.value.__notes__
    assert first.startswith("rank 1 failed first:\nTraceback")
    assert others.startswith("then ranks 0 and 2 failed in ")
    assert "rank 1" not in others


def test_a_failure_leaves_the_workers_usable(pool):
    before = pool.run(rank_functions.pid, 2)
    with pytest.raises(KeyError):
        pool.run(rank_functions.raise_on, 2, 0)
    assert pool.run(rank_functions.pid, 2) == before


def test_a_killed_worker_is_named_and_replaced(pool):
    before = pool.run(rank_functions.pid, 3)
    with pytest.raises(PeerFailed) as caught:
        pool.run(rank_functions.kill_on, 3, 1)
    assert caught.value.rank == 1
    assert "it was killed by SIGKILL" in str(caught.value)
    after = pool.run(rank_functions.pid, 3)
    assert before[1] not in after
    assert len(set(after)) == 3


def test_a_worker_that_died_between_two_jobs_is_replaced(pool):
    first, second = pool.run(rank_functions.pid, 2)
    pidfd = os.pidfd_open(first)
    os.kill(first, signal.SIGKILL)
    assert select.select([pidfd], [], [], 10)[0]
    os.close(pidfd)
    after = pool.run(rank_functions.pid, 2)
    assert after[0] == second
    assert first not in after


def test_a_death_is_the_cause_though_it_was_blamed_before_it_happened(pool):
    with pytest.raises(PeerFailed, match="rank 1 failed: it was killed by SIGKILL") as caught:
        pool.run(rank_functions.kill_after_blame, 2)
    assert caught.value.__notes__[1].startswith("then rank 0 raised PeerFailed")


def test_a_death_is_noticed_while_a_child_keeps_the_connections_open(pool):
    pool.run(rank_functions.pid, 2)  # starts the ranks, which takes long on a busy machine
    begin = time.monotonic()
    with pytest.raises(PeerFailed, match="rank 0 failed: it was killed by SIGKILL"):
        pool.run(rank_functions.kill_while_a_child_lives, 2, 0)
    assert time.monotonic() - begin < 25, "the child lives for 50 s"


def test_an_exit_without_a_word_is_a_failure(pool):
    with pytest.raises(PeerFailed, match="it exited with status 0 before it returned"):
        pool.run(rank_functions.exit_with, 1, 0)


@pytest.mark.slow
def test_a_rank_that_hangs_after_the_failure_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("echelon.launch.spawn.GRACE", 0.3)
    with RankPool() as own:
        with pytest.raises(ValueError, match="the cause"):
            own.run(rank_functions.hang_after_failure, 2)
        assert own.run(rank_functions.who, 2) == [(0, 2), (1, 2)]


def test_a_job_that_does_not_return_is_given_up_and_its_ranks_are_named(new_pool):
    with new_pool() as own:
        own.run(rank_functions.who, 1)
        with pytest.raises(Timeout, match=r"rank 0 of 1 did not return within 0.3 s"):
            own.run(rank_functions.hang, 1, timeout=0.3)


def start_a_child(_group, path):
    path.write_text(str(subprocess.Popen(["sleep", "120"]).pid))
    time.sleep(120)


def test_a_rank_that_is_given_up_leaves_no_child(new_pool, tmp_path):
    """Workers of a DataLoader that still import torch then never learn of its death."""
    path = tmp_path / "child"
    with new_pool() as own:
        own.run(rank_functions.who, 1)
        with pytest.raises(Timeout):
            own.run(start_a_child, 1, path, timeout=3.0)
    stat = Path(f"/proc/{path.read_text()}/stat")
    while stat.exists() and stat.read_text().rpartition(") ")[2][0] != "Z":  # its new parent may collect it later
        time.sleep(0.01)


def test_what_cannot_be_pickled_is_described(pool):
    with pytest.raises(PeerFailed, match="rank 0 failed: it raised Unpicklable: one and two"):
        pool.run(rank_functions.raise_unpicklable, 1)
    with pytest.raises(LaunchError, match=r"result of this rank, .*, cannot be sent .* \(cannot pickle .*\): return "):
        pool.run(rank_functions.return_unpicklable, 1)


def test_bad_input_is_refused(pool):
    with pytest.raises(InvalidWorldSize):
        pool.run(rank_functions.who, 0)
    with pytest.raises(LaunchError, match="lambda"):
        pool.run(lambda _: 0, 1)


def test_a_closed_pool_says_so():
    own = RankPool()
    own.close()
    own.close()
    assert repr(own) == "<RankPool: closed>"
    with pytest.raises(LaunchError, match="closed: make a new one"):
        own.run(rank_functions.who, 1)


def pid_of(group):
    return os.getpid()


def test_a_forked_child_that_ends_leaves_the_workers_alone(pool):
    (before,) = pool.run(pid_of, 1)
    child = os.fork()
    if child == 0:
        try:
            pool.close()  # as at the end of a program
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert pool.run(pid_of, 1) == [before]
