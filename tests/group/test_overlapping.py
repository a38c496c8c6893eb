"""Any number of operations under way, on overlapping groups, from several threads: all of them finish right."""

import random
import threading

import pytest
import torch

import echelon

MEMBERS = ((0, 1, 2, 3), (0, 1, 2), (1, 2, 3), (3, 0), (2, 1), (0, 3, 1))
NUM_CALLS = 12


def value(group_number, call, rank):
    return float(1 + group_number * 1000 + call * 10 + rank)


def make_call(group, members, number, call, async_op):
    """Makes the n-th call of a group and returns what finishes and checks it."""
    mine = torch.full((1 + 97 * (call % 4),), value(number, call, group.rank))
    values = [value(number, call, rank) for rank in range(len(members))]
    kind = call % 5
    if kind == 0:
        got, wanted = group.all_reduce(mine, async_op=async_op), sum(values)
    elif kind == 1:
        got, wanted = group.broadcast(mine, call % len(members), async_op=async_op), values[call % len(members)]
    elif kind == 2:
        got, wanted = group.all_gather(mine[:1], async_op=async_op), values
    elif kind == 3:
        got, wanted = group.all_gather_object(values[group.rank], async_op=async_op), values
    else:
        got, wanted = group.all_reduce_coalesced([mine[:2], mine[2:].double()], "max", async_op=async_op), max(values)

    def finish():
        result = got.wait() if async_op else got
        if isinstance(wanted, list):
            assert list(result) == wanted
        else:
            for tensor in result if isinstance(result, list) else [result]:
                assert bool((tensor == wanted).all()), f"group {number}, call {call}: {tensor[:1]}, not {wanted}"

    return finish


def groups_of(group):
    parts = [(number, members, group.subgroup(members)) for number, members in enumerate(MEMBERS)]
    return [(number, members, part) for number, members, part in parts if part is not None]


def many_under_way(group, seed):
    """Calls of one group keep their order, those of different groups are made in another order on each rank."""
    parts = groups_of(group)
    queue = [part for part in parts for _ in range(NUM_CALLS)]
    random.Random(seed * 100 + group.rank).shuffle(queue)
    calls, finishes = dict.fromkeys(range(len(MEMBERS)), 0), []
    for number, members, part in queue:
        finishes.append(make_call(part, members, number, calls[number], True))
        calls[number] += 1
    random.Random(group.rank).shuffle(finishes)
    for finish in finishes:
        finish()
    return len(finishes)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_all_under_way_at_once_on_processes(pool, backend):
    for seed in range(3):
        assert sum(pool.run(many_under_way, 4, seed, backend=backend)) == NUM_CALLS * sum(map(len, MEMBERS))


@pytest.mark.parametrize("late_sends", [False, True])
def test_all_under_way_at_once_on_simulated_ranks(late_sends):
    assert echelon.explore(many_under_way, 4, seeds=range(8), args=(1,), late_sends=late_sends) == 8


def from_threads(group):
    """A thread for each group, some of whose calls are asynchronous, and messages beside them."""
    errors = []

    def talk(number, members, part):
        try:
            finishes = [make_call(part, members, number, call, call % 3 == 0) for call in range(NUM_CALLS)]
            right, left = (part.rank + 1) % part.world_size, (part.rank - 1) % part.world_size
            got = part.sendrecv(torch.tensor([number, part.rank]), right, left, tag=number)
            assert got.tolist() == [number, left]
            for finish in finishes:
                finish()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=talk, args=part, daemon=True) for part in groups_of(group)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if errors:
        raise errors[0]
    return not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_thread_for_each_group(pool, backend):
    for _ in range(3):
        assert pool.run(from_threads, 4, backend=backend) == [True] * 4
