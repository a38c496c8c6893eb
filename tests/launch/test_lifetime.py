"""Worlds that are made and closed, one after another, leave nothing behind in their process."""

import ctypes
import gc
import logging
import os
import threading
from collections import Counter
from contextlib import nullcontext, suppress
from functools import partial
from typing import NamedTuple

import pytest
import torch

import echelon
from echelon.backends.tcp.backend import TcpBackend
from echelon.group.group import ProcessGroup
from echelon.launch.environment import REQUIRED
from tests.helpers.forked_ranks import fork_and_collect
from tests.helpers.worlds import free_address

EARLY = 20
MIB = 1 << 20
GROWTH = 8
"""MiB. 20 worlds that kept a tensor each would leave 20. The C library moves by up to 3, and does not grow."""
SLOW = pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(600)])


class Left(NamedTuple):
    """What there is in a process between two worlds."""

    files: int
    maps: int
    threads: int
    groups: int
    memory: float
    """Resident, in MiB."""


def left():
    """Returns what there is now; of the maps those of files and shared memory, since malloc makes others at will."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory that malloc keeps is no leak: 12 MiB of it at times
    with open("/proc/self/maps") as file:
        maps = sum(line.split()[4] != "0" for line in file)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    objects = gc.get_objects()
    groups = sum(type(each) in (ProcessGroup, TcpBackend) for each in objects)
    return Left(len(os.listdir("/proc/self/fd")), maps, threading.active_count(), groups, pages * 4096 / MIB)


def opened_files():
    """Returns what the descriptors of this process stand for, such as socket:[number]."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def use(group):
    """Does a little of everything that keeps something: lanes, regions, arenas, shared tensors, subgroups."""
    group.all_reduce(torch.ones(3))
    group.all_reduce(torch.ones(3), async_op=True).wait()
    part = group.subgroup(range(group.world_size))
    part.barrier()
    shared = group.empty(1000)
    group.all_reduce(shared.fill_(1.0))
    if group.world_size > 1:
        peer = 1 - group.rank
        group.isend(torch.ones(MIB // 4), peer)
        assert group.recv(peer).sum() == MIB // 4


def be_closed(backend):
    with echelon.init(backend=backend, timeout=60.0) as group:
        use(group)


def train(backend):
    with echelon.init(backend=backend, timeout=60.0) as group:
        model = echelon.DDP(torch.nn.Linear(100, 100), group)
        for _ in range(2):
            model(torch.ones(2, 100)).sum().backward()


def raise_on_one_rank(backend):
    with echelon.init(backend=backend, timeout=60.0) as group:
        if group.rank == 1:
            raise ValueError("bad luck")
        group.all_reduce(torch.ones(3))


def fail(backend):
    """One rank raises, and the other hears of it in a collective."""
    with pytest.raises((ValueError, echelon.PeerFailed)):
        raise_on_one_rank(backend)


def find_nobody(_):
    os.environ["RANK"] = "0"
    with pytest.raises(echelon.ConnectError):
        echelon.init(timeout=0.02)


def leave_work(backend):
    """A world is closed while something is under way in it."""
    group = echelon.init(backend=backend, timeout=60.0)
    group.irecv(1 - group.rank, tag=1)
    group.isend(torch.ones(MIB // 4), 1 - group.rank)
    group.barrier()
    with suppress(echelon.CollectiveMismatch):  # a message that nobody has received
        group.close()


def keep_tensors(backend):
    """Tensors live longer than the world, but no longer than anybody refers to them."""
    with echelon.init(backend=backend, timeout=60.0) as group:
        shared = group.empty(1000).fill_(1.0)
        group.isend(torch.ones(MIB // 4), 1 - group.rank)
        received = group.recv(1 - group.rank)
        group.barrier()
    del group
    assert (shared.sum().item(), received.sum().item()) == (1000.0, MIB // 4)


def be_a_rank(environ, act, backend, times):
    """Makes worlds and ends them; returns what there is after EARLY of them and in the end."""
    for name in (*REQUIRED, "ECHELON_BACKEND"):
        os.environ.pop(name, None)
    os.environ.update(environ)
    logging.getLogger("echelon").setLevel(logging.CRITICAL)  # who is missing is told in a warning each time
    early = None
    for turn in range(times):
        act(backend)
        if turn + 1 == EARLY:
            early = left()
    return early, left()


def run_worlds(world_size, act, backend, times):
    with free_address() as address:
        host, _, port = address.rpartition(":")
        common = {"MASTER_ADDR": host, "MASTER_PORT": port, "ECHELON_SECRET": "lifetime" * 4}
        common["WORLD_SIZE"] = str(world_size)
        ranks = [partial(be_a_rank, common | {"RANK": str(rank)}, act, backend, times) for rank in range(world_size)]
        return [[Left(*each) for each in result] for result in fork_and_collect(ranks, timeout=500.0)]


def check(early, late):
    assert late[:4] == early[:4], f"{late} after more worlds than {early}"
    assert late.groups == 0
    assert late.memory - early.memory <= GROWTH, f"{late} after more worlds than {early}"


@pytest.mark.parametrize("times", [40, SLOW])
@pytest.mark.parametrize(("world_size", "backend"), [(2, "shm"), (2, "tcp"), (1, "auto")])
def test_closed_worlds_leave_nothing(world_size, backend, times):
    for early, late in run_worlds(world_size, be_closed, backend, times):
        check(early, late)


@pytest.mark.parametrize(
    "act", [train, fail, *(pytest.param(act, marks=pytest.mark.slow) for act in (leave_work, keep_tensors))]
)
def test_neither_do_those_that_end_in_another_way(act):
    for early, late in run_worlds(2, act, "shm", 40):
        check(early, late)


def test_neither_do_those_that_never_begin():
    with free_address() as address:
        host, _, port = address.rpartition(":")
        environ = {"MASTER_ADDR": host, "MASTER_PORT": port, "ECHELON_SECRET": "lifetime" * 4, "WORLD_SIZE": "2"}
        ((early, late),) = fork_and_collect([partial(be_a_rank, environ, find_nobody, "auto", 40)], timeout=60.0)
    check(Left(*early), Left(*late))


def simulated_rank(group, fails):
    group.all_reduce(torch.ones(3), async_op=True).wait()
    model = echelon.DDP(torch.nn.Linear(10, 10), group)
    model(torch.ones(2, 10)).sum().backward()
    if fails and group.rank == 1:
        raise ValueError("bad luck")


def simulate_often(times, fails):
    early = None
    for turn in range(times):
        with pytest.raises(ValueError, match="bad luck") if fails else nullcontext():
            echelon.simulate(simulated_rank, 2, (fails,))
        if turn + 1 == EARLY:
            early = left()
    return early, left()


@pytest.mark.parametrize("times", [40, SLOW])
@pytest.mark.parametrize("fails", [False, True])
def test_simulations_leave_nothing(times, fails):
    ((early, late),) = fork_and_collect([partial(simulate_often, times, fails)], timeout=500.0)
    check(Left(*early), Left(*late))


def rank_of(group):
    return group.rank


def spawn_often(times):
    counts = []
    for _ in range(times):
        assert echelon.spawn(rank_of, 1) == [0]
        counts.append(left())
    return counts[1], counts[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_spawned_jobs_leave_nothing():
    ((early, late),) = fork_and_collect([partial(spawn_often, 12)], timeout=500.0)
    check(Left(*early), Left(*late))


def test_jobs_of_a_pool_leave_nothing(new_pool):
    with new_pool() as own:  # other tests may have left files open in the ranks of the fixture `pool`
        for _ in range(EARLY):  # on a busy machine ranks held two more files after five jobs, and let go of them
            own.run(use, 2)
        early = own.run(left_in_worker, 2)
        for _ in range(EARLY):
            own.run(use, 2)
        late = own.run(left_in_worker, 2)
    for (before, opened_before), (after, opened) in zip(early, late, strict=True):
        assert after[:4] == before[:4], Counter(opened) - Counter(opened_before)
        assert after.memory - before.memory <= GROWTH


def left_in_worker(group):
    group.barrier()  # the segments of the group have arrived by then
    return left(), opened_files()
