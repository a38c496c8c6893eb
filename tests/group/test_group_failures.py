"""Groups over real sockets: ranks that die in the middle of a collective, and many groups and threads at once."""

import contextlib
import mmap
import os
import random
import signal
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import echelon
from echelon import functional
from echelon.group.group import ProcessGroup
from tests.helpers.forked_ranks import run_forked
from tests.helpers.worlds import gloo_world, on_every_rank, rank_0_and_a_bare_peer, tcp_world

SECONDS = 20.0
SOON = 5.0  # far from SECONDS; within a second on a machine that has nothing else to do


def reduce_until_one_dies(group, victim, iteration, size, clock):
    """Returns, on a survivor: who it says failed, how many seconds after the death, and what it said."""
    tensor = torch.ones(size)
    try:
        for number in range(10_000):
            if group.rank == victim and number == iteration:
                clock[:8] = struct.pack("<d", time.monotonic())
                os.kill(os.getpid(), signal.SIGKILL)
            group.all_reduce(tensor, "max")
    except echelon.PeerFailed as error:
        return error.rank, time.monotonic() - struct.unpack("<d", clock[:8])[0], str(error)
    return None


@pytest.mark.parametrize("backend", ["tcp", "shm", "gloo"])
@pytest.mark.parametrize("size", [1, 100_000])
def test_every_survivor_names_the_rank_that_was_killed(size, backend):
    """Not one of the others, which give up because of it."""
    for run in range(2):
        victim, iteration = 3 - 2 * run, random.Random(run).randrange(1, 30)
        with mmap.mmap(-1, 8) as clock:
            outcomes = run_forked(reduce_until_one_dies, 4, victim, iteration, size, clock, backend=backend)
        assert sorted(outcomes) == [rank for rank in range(4) if rank != victim]
        for failed, seconds, message in outcomes.values():
            assert failed == victim, message
            assert f"all_reduce(max) of float32[{size}]" in message
            assert seconds < SOON, f"rank {victim} was killed, and that was noticed after {seconds:.2f} s"


def die_beside_an_asynchronous_operation(group, clock):
    """Every rank has operations under way on two groups when one dies."""
    other = group.subgroup(range(group.world_size))
    works = [part.all_reduce(torch.ones(4), async_op=True) for part in (group, other)]
    for work in works:
        work.wait()
    if group.rank == 1:
        clock[:8] = struct.pack("<d", time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    works = [part.all_reduce(torch.ones(4), async_op=True) for part in (other, group)]
    failed = []
    for work in works:
        try:
            work.wait()
        except echelon.PeerFailed as error:
            failed.append(error.rank)
    return failed, time.monotonic() - struct.unpack("<d", clock[:8])[0]


@pytest.mark.parametrize("backend", ["tcp", "shm", "gloo"])
def test_operations_under_way_on_several_groups_all_fail(backend):
    with mmap.mmap(-1, 8) as clock:
        outcomes = run_forked(die_beside_an_asynchronous_operation, 3, clock, backend=backend)
    assert sorted(outcomes) == [0, 2]
    for failed, seconds in outcomes.values():
        assert failed == [1, 1]
        assert seconds < SOON


MEMBERS = ([0, 1, 2], [0, 1], [2, 1], [0, 2])


def reduce_in_threads(group):
    parts = [group.subgroup(members) for members in MEMBERS]
    mine = [(number, part) for number, part in enumerate(parts) if part is not None]
    random.Random(group.rank).shuffle(mine)

    def work(number, part):
        return number, [part.all_reduce(torch.full((500,), 10.0**group.rank + turn)).sum() for turn in range(20)]

    with ThreadPoolExecutor(len(mine)) as threads:
        return dict(threads.map(lambda pair: work(*pair), mine))


@pytest.mark.parametrize("connected", [tcp_world, gloo_world])
def test_threads_reduce_on_groups_of_their_own(connected):
    """Over Gloo, two threads that made connections for two groups once waited for each other."""
    with connected(3) as world:
        results = on_every_rank(world, reduce_in_threads)
    for rank, got in enumerate(results):
        assert sorted(got) == [number for number, members in enumerate(MEMBERS) if rank in members]
        for number, sums in got.items():
            total = sum(10.0**member for member in MEMBERS[number])
            assert [value.item() for value in sums] == [
                500 * (total + turn * len(MEMBERS[number])) for turn in range(20)
            ]


def reduce_in_another_order(group):
    parts = [group.subgroup(members) for members in MEMBERS]
    mine = [(number, turn) for number, part in enumerate(parts) if part is not None for turn in range(5)]
    order = list(range(len(MEMBERS)))
    random.Random(group.rank).shuffle(order)
    mine.sort(key=lambda pair: (order[pair[0]], pair[1]))  # within a group, the order is the same everywhere
    works = {
        (number, turn): parts[number].all_reduce(torch.full((2000,), 10.0**group.rank + turn), async_op=True)
        for number, turn in mine
    }
    waiting = list(works)
    random.Random(group.rank + 7).shuffle(waiting)
    return {pair: works[pair].wait()[0].item() for pair in waiting}


@pytest.mark.parametrize("connected", [tcp_world, gloo_world])
def test_operations_of_several_groups_meet_whatever_their_order(connected):
    with connected(3) as world:
        results = on_every_rank(world, reduce_in_another_order)
    for got in results:
        for (number, turn), value in got.items():
            members = MEMBERS[number]
            assert value == sum(10.0**member for member in members) + turn * len(members)


def test_a_blocking_operation_ends_when_one_in_the_background_fails():
    """A thread that polls was not told that another one had given up the group."""
    with tcp_world(2) as world:
        group = ProcessGroup(world[0], timeout=SECONDS)
        background = group.all_reduce(torch.ones(1), async_op=True, timeout=0.3)
        begin = time.monotonic()
        with pytest.raises(echelon.PeerFailed, match=r"rank 1 failed: it kept rank 0 waiting, which gave up"):
            group.barrier()
        assert time.monotonic() - begin < SOON
        with pytest.raises(echelon.Timeout):
            background.wait()


def test_the_default_device_and_dtype_of_the_caller_do_not_matter():
    with tcp_world(2) as world:

        def act(group):
            with torch.device("meta"):
                group.barrier()
                got = group.all_gather_object({"rank": group.rank})
                total = group.all_reduce(torch.ones(3, device="cpu", dtype=torch.bfloat16))
                parts = functional.all_to_all(torch.ones(2, device="cpu"), group)
                return got, total.tolist(), parts.tolist()

        assert on_every_rank(world, act) == [([{"rank": 0}, {"rank": 1}], [2.0, 2.0, 2.0], [1.0, 1.0])] * 2


def test_a_collective_that_a_stranger_breaks_fails_by_its_name():
    with rank_0_and_a_bare_peer(timeout=SECONDS) as (backend, peer):
        group = ProcessGroup(backend)
        peer.sendall(b"\xff" * 40)
        with pytest.raises(echelon.PeerFailed, match=r"rank 1 failed: frame of unknown kind 255.*barrier, #1"):
            group.barrier()


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "all_gather"])
def test_a_failed_operation_writes_nothing_later(operation):
    """What was still arriving went into the caller's tensor after the error had been raised.

    And a broadcast to a rank that had given up went on until its own time was up, since only receives were ended.
    """
    with tcp_world(2) as world:
        groups = [ProcessGroup(backend, timeout=SECONDS) for backend in world]
        tensor = torch.zeros(1 << 20)
        call = partial(groups[1].broadcast, tensor, 0) if operation == "broadcast" else None
        call = call or partial(getattr(groups[1], operation), tensor)
        with pytest.raises(echelon.Timeout):
            call(timeout=0.05)
        before = tensor.clone()
        with contextlib.suppress(echelon.PeerFailed):  # or it succeeds, if all it needs had been sent
            getattr(groups[0], operation)(torch.ones(1 << 20))
        with pytest.raises(echelon.PeerFailed, match=r"rank 0 failed: it kept rank 1 waiting, which gave up"):
            groups[0].barrier()
        assert torch.equal(tensor, before)
