"""Worlds that are made and closed, one after another, leave nothing behind in their process."""

import gc
import os
import threading
from functools import partial
from typing import NamedTuple

import pytest
import torch

import echelon
from echelon.backends.tcp.backend import TcpBackend
from echelon.group import ProcessGroup
from echelon.launch.environment import REQUIRED
from tests.backends.forked import fork_and_collect
from tests.backends.worlds import free_address

EARLY = 20
MIB = 1 << 20
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
    with open("/proc/self/maps") as file:
        maps = sum(line.split()[4] != "0" for line in file)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    objects = gc.get_objects()
    groups = sum(type(each) in (ProcessGroup, TcpBackend) for each in objects)
    return Left(len(os.listdir("/proc/self/fd")), maps, threading.active_count(), groups, pages * 4096 / MIB)


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


def be_a_rank(environ, backend, times):
    """Makes and closes worlds; returns what there is after EARLY of them and in the end."""
    for name in (*REQUIRED, "ECHELON_BACKEND"):
        os.environ.pop(name, None)
    os.environ.update(environ)
    early = None
    for turn in range(times):
        with echelon.init(backend=backend, timeout=60.0) as group:
            use(group)
        del group
        if turn + 1 == EARLY:
            early = left()
    return early, left()


def run_worlds(world_size, backend, times):
    with free_address() as address:
        host, _, port = address.rpartition(":")
        common = {"MASTER_ADDR": host, "MASTER_PORT": port, "ECHELON_SECRET": "lifetime" * 4}
        common["WORLD_SIZE"] = str(world_size)
        ranks = [partial(be_a_rank, common | {"RANK": str(rank)}, backend, times) for rank in range(world_size)]
        return [[Left(*each) for each in result] for result in fork_and_collect(ranks, timeout=500.0)]


def check(early, late):
    assert late[:4] == early[:4], f"{late} after more worlds than {early}"
    assert late.groups == 0
    assert late.memory - early.memory <= 12, f"{late} after more worlds than {early}"


@pytest.mark.parametrize("times", [60, SLOW])
@pytest.mark.parametrize(("world_size", "backend"), [(2, "shm"), (2, "tcp"), (1, "auto")])
def test_closed_worlds_leave_nothing(world_size, backend, times):
    for early, late in run_worlds(world_size, backend, times):
        check(early, late)
