"""Ranks that share memory and give up, disagree, come late or leave."""

import gc
import os
import random
import threading
import time

import pytest
import torch

import echelon
from echelon.backends.shared.backend import share
from echelon.backends.tcp.backend import TcpBackend
from echelon.group.group import ProcessGroup
from tests.helpers.forked_ranks import run_forked
from tests.helpers.worlds import SECRET, free_address


def disagree(group):
    """Each rank calls something else; returns the error of each."""
    calls = [
        lambda: group.all_reduce(torch.ones(4)),
        lambda: group.all_reduce(torch.ones(5)),
        lambda: group.barrier(),
    ]
    try:
        calls[group.rank]()
    except echelon.CollectiveMismatch as error:
        return str(error)
    return "nothing"


def test_ranks_that_disagree_are_told_both_sides_at_once():
    begin = time.monotonic()
    notes = ["all_reduce(sum) of float32[4], #1", "all_reduce(sum) of float32[5], #1", "barrier, #1"]
    for text in run_forked(disagree, 3, backend="shm").values():
        assert sum(note in text for note in notes) >= 2, text  # a third rank may have been faster to tell of two others
    assert time.monotonic() - begin < 5.0


def disagree_in_the_large(group):
    tensor = torch.ones(500_000) if group.rank else torch.ones(500_001)
    try:
        group.all_reduce(tensor)
    except echelon.CollectiveMismatch as error:
        return "float32[500000]" in str(error), "float32[500001]" in str(error), bool((tensor == 1).all())
    return None


def test_a_large_operation_that_ranks_disagree_on_changes_nothing():
    assert set(map(tuple, run_forked(disagree_in_the_large, 2, backend="shm").values())) == {(True, True, True)}


def be_late(group):
    if group.rank == 1:
        group.recv(0, 7)
        try:
            group.barrier()
        except echelon.PeerFailed as error:
            return error.rank, str(error)
        return None
    revoke = group.backend.control.revoke

    def revoke_late(*arguments):
        """Tells the others only when rank 1 is in its barrier, where it sees what this rank has announced."""
        group.send(torch.ones(1), 1, 7)
        while group._runner._executor._shared.board.missing():
            time.sleep(0.001)
        return revoke(*arguments)

    group.backend.control.revoke = revoke_late
    try:
        group.all_reduce(torch.ones(3), timeout=0.2)
    except echelon.Timeout as error:
        return -1, str(error)
    return None


def test_a_timeout_names_who_is_missing_and_ends_the_group_everywhere():
    """Also where a message of the rank that gave up comes before the word that it did."""
    outcomes = run_forked(be_late, 2, backend="shm")
    assert outcomes[0][0] == -1
    assert "all_reduce(sum) of float32[3], #1" in outcomes[0][1]
    assert "rank 1" in outcomes[0][1]
    assert outcomes[1][0] == 1
    assert "it kept rank 0 waiting, which gave up: rank 0 in all_reduce(sum) of float32[3], #1" in outcomes[1][1]


def wait_idly(group):
    """Returns which share of a core rank 0 uses while it waits in a collective."""
    group.all_reduce(torch.ones(1))
    if group.rank == 1:
        with pytest.raises(echelon.Timeout):
            group.recv(0, 7, timeout=1.5)
    begin, used = time.monotonic(), time.process_time()
    group.barrier()
    return (time.process_time() - used) / (time.monotonic() - begin)


def test_a_rank_that_waits_uses_little_of_a_core():
    # 50 times a second it looks around, 0.006 to 0.014 of a core. A rank that polls uses all of it.
    assert any(run_forked(wait_idly, 2, backend="shm")[0] < 0.03 for _ in range(3))


def mix_threads_and_groups(group):
    """Asynchronous and blocking operations of several groups, started in one order and waited for in another."""
    other = group.subgroup(list(reversed(range(group.world_size))))
    chance = random.Random(3 + group.rank)
    works = []
    for turn in range(40):
        for part in (group, other):
            size = (5, 100_000)[turn % 2]
            works.append((turn, part.all_reduce(torch.full((size,), float(turn)), async_op=True)))
        if turn % 5 == 0:
            assert group.all_reduce(torch.ones(2)).tolist() == [group.world_size] * 2
            other.barrier()
    chance.shuffle(works)
    return all(bool((work.wait() == turn * group.world_size).all()) for turn, work in works)


def test_asynchronous_and_blocking_operations_of_several_groups_never_mix():
    assert list(run_forked(mix_threads_and_groups, 3, backend="shm").values()) == [True] * 3


def use_in_a_child(group):
    group.barrier()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            group.barrier()
        except echelon.Closed:
            os.write(writing, b"closed")
        os._exit(0)
    os.close(writing)
    said = os.read(reading, 100).decode()
    os.waitpid(pid, 0)
    return said, group.all_reduce(torch.ones(1)).item()


def test_a_forked_child_is_told_and_the_parent_goes_on():
    assert set(map(tuple, run_forked(use_in_a_child, 2, backend="shm").values())) == {("closed", 2.0)}


def leave(group):
    group.barrier()
    if group.rank == 1:
        return "left"
    try:
        group.barrier()
    except (echelon.PeerFailed, echelon.CollectiveMismatch) as error:
        return "rank 1" in str(error) and "closed its group" in str(error)
    return "nothing"


def test_a_rank_that_has_left_is_named():
    assert run_forked(leave, 2, backend="shm") == {0: True, 1: "left"}


def resources():
    """Returns how many files are open, parts of the shared memory mapped, and threads running."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:echelon" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), mapped, threading.active_count()


def open_and_close(group, times, address):
    """Makes and closes worlds beside the one that is there; what is open, mapped and running does not become more."""
    counts, inherited = [], resources()[1]  # what earlier tests left to the collector is mapped in this fork, too
    for turn in range(times):
        tcp = TcpBackend(group.rank, group.world_size, address, secret=SECRET, connect_timeout=20)
        backend = share(tcp, required=True, timeout=20.0)
        with ProcessGroup(backend) as inner:
            inner.all_reduce(torch.ones(3), async_op=turn % 2 == 1)
            inner.all_gather(torch.ones(100_000))
            for length in (1, 100_000):
                inner.isend(torch.ones(length), 1 - group.rank)
                inner.recv(1 - group.rank)
            part = inner.subgroup([group.rank])
            part.barrier()
        del inner, part, backend, tcp
        counts.append(resources())
    return counts[2], counts[-1], inherited


def drop_groups(group, times):
    """Makes groups of all ranks, which map a region each, and drops them, while nobody collects garbage."""
    gc.collect()
    gc.disable()
    counts = []
    for _ in range(times):
        part = group.subgroup(range(group.world_size))
        part.all_reduce(torch.ones(3))
        part.all_reduce(torch.ones(1_000_000))
        del part
        with open("/proc/self/maps") as maps:
            counts.append(sum("memfd:echelon" in line for line in maps))
    gc.enable()
    return counts


def test_a_group_that_nobody_refers_to_gives_its_memory_back_at_once():
    for counts in run_forked(drop_groups, 2, 5, backend="shm").values():
        assert len(set(counts)) == 1, counts


@pytest.mark.parametrize("times", [20, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_nothing_is_left_after_closing(times):
    with free_address() as address:
        outcomes = run_forked(open_and_close, 2, times, address, timeout=500.0)
    for early, late, inherited in outcomes.values():
        assert early == late
        assert late[1] == inherited
