"""Collectives as one event: the bits of real processes, and the errors of collectives by messages."""

import gc
import re
import tracemalloc
from contextlib import contextmanager

import pytest
import torch

import echelon
from echelon.errors import LaunchError
from echelon.simulation.meeting import Meeting
from echelon.simulation.world import World
from tests.helpers.reductions import digests

WAYS = ("whole", "messages")


@pytest.mark.parametrize("order", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "world_size",
    [pytest.param(2, marks=pytest.mark.slow), 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))],
)
def test_reductions_have_the_bits_of_real_processes(pool, world_size, order):
    real = pool.run(digests, world_size, backend=order)
    for way in WAYS:
        found = echelon.simulate(digests, world_size, collectives=way, order=order).results
        for rank in range(world_size):
            assert {name for name in real[rank] if real[rank][name] != found[rank][name]} == set()


def sum_thirds(group):
    generator = torch.Generator().manual_seed(group.rank)
    return tuple(group.all_reduce(torch.randn(100, generator=generator) / 3).tolist())


def test_orders_differ_where_sums_are_rounded():
    """Otherwise the tests of the two orders would not tell them apart."""
    sums = {order: set(echelon.simulate(sum_thirds, 7, order=order).results) for order in ("shm", "tcp")}
    assert all(len(found) == 1 for found in sums.values())
    assert sums["shm"] != sums["tcp"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"collectives": "all"}, 'collectives=\'all\': use "whole" or "messages", or None'),
        ({"collectives": True}, "collectives=True: use"),
        ({"order": "ring"}, 'order=\'ring\': use "shm" or "tcp"'),
        ({"order": None}, "order=None: use"),
        (
            {"collectives": "whole", "faults": [echelon.Delay(1.0)]},
            r'collectives="whole" has no messages for delay:.*: use collectives="messages"',
        ),
        ({"collectives": "whole", "faults": [echelon.Kill(1, at_op=3)]}, "has no messages for kill:1@op=3"),
        ({"collectives": "whole", "faults": [echelon.NetworkPartition({0}, {1})]}, "has no messages for partition:"),
    ],
)
def test_wrong_arguments_are_one_line(given, told):
    for act in (echelon.simulate, echelon.explore):
        with pytest.raises(LaunchError, match=told) as caught:
            act(sum_thirds, 2, **given)
        assert "\n" not in str(caught.value)


def num_message_events(run):
    return sum(" sends to rank " in line for line in run.trace.splitlines())


def test_messages_are_played_where_something_looks_inside():
    def run(**given):
        return num_message_events(echelon.simulate(sum_thirds, 2, **given))

    assert run() == run(network="10GbE") == run(collectives="whole", late_sends=True) == 0
    assert run(collectives="messages") == run(late_sends=True) == run(faults=[echelon.Pause(1, 0, 1)]) == 2
    runs = []
    echelon.explore(sum_thirds, 2, seeds=[0], check=runs.append)
    echelon.explore(sum_thirds, 2, seeds=[0], check=runs.append, collectives="whole")
    assert [num_message_events(run) for run in runs] == [2, 0]


def test_each_rank_and_collective_has_one_event():
    def act(group):
        group.all_reduce(torch.ones(3))
        group.broadcast(torch.ones(2), 1)

    lines = echelon.simulate(act, 3).trace.splitlines()
    calls = [re.sub(r" by \w+$", "", line) for line in lines if " calls " in line]
    assert sorted(calls) == sorted(
        f"0.0 rank {rank} calls {call}"
        for rank in range(3)
        for call in ("all_reduce(sum) of float32[3], #1", "broadcast(src=1) of float32[2], #2")
    )
    assert len(lines) == len(calls) + 3  # and the end of each rank


# Failures


def fail_in_one(group):
    """Returns what every other rank gets if rank 1 raises, whenever that is caught."""
    group.barrier()
    try:
        if group.rank == 1:
            raise ValueError("rank 1 is to blame")
        group.all_reduce(torch.ones(3))
    except echelon.PeerFailed as error:
        return error.rank
    return None


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_raises_ends_the_wait_of_the_others(way):
    with pytest.raises(ValueError, match="rank 1 is to blame"):
        echelon.simulate(fail_in_one, 4, collectives=way)


def survive(group, call):
    try:
        for _ in range(20):
            call(group)
    except echelon.PeerFailed as error:
        return error.rank, group.backend.now() < 1.0
    return None


@pytest.mark.parametrize("network", [None, "1GbE"])
@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.all_reduce(torch.ones(3)),
        lambda group: group.all_reduce(torch.ones(3), async_op=True).wait(),
        lambda group: (group.broadcast(torch.ones(3), 0), group.barrier()),
        lambda group: (group.gather(torch.ones(3), 3), group.barrier()),
    ],
)
def test_a_killed_rank_ends_the_wait_of_the_others(call, network):
    def program(group):
        if network is None:  # time passes only in computing
            return survive(group, lambda group: (compute(group), call(group)))
        return survive(group, call)

    def compute(group):
        with group.backend.compute("step"):
            pass

    for at in (0.0, 0.0001, 0.00033):
        run = echelon.simulate(
            program,
            4,
            network=network,
            costs={"step": 1e-4},
            collectives="whole",
            faults=[echelon.Kill(2, at=at)],
        )
        assert run.results == [(2, True), (2, True), None, (2, True)]


def leave_early(group, call):
    group.barrier()
    if group.rank == 2:
        with group.backend.compute("pause"):  # the others have ended the barrier by then
            pass
        group.close()
        return None
    with pytest.raises(echelon.CollectiveMismatch, match=r"but rank 2 has closed") as caught:
        call(group)
    return caught.value.departed


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_closes_is_missed_by_name(way):
    run = echelon.simulate(leave_early, 4, (lambda group: group.barrier(),), costs={"pause": 1.0}, collectives=way)
    assert run.results == [2, 2, None, 2]


def broadcast_and_leave(group):
    own = torch.full((1000,), float(group.rank))
    group.broadcast(own, 0)
    if group.rank == 0:
        group.close()
    return own[0].item()


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_has_ended_its_part_may_leave(way):
    """The root has left long before rank 3 has its values, which come from rank 1."""

    def slow_from_1(src, _):
        return echelon.Network(latency=1.0 if src == 1 else 1e-6)

    run = echelon.simulate(broadcast_and_leave, 4, network=slow_from_1, collectives=way)
    assert run.results == [0.0] * 4
    assert run.elapsed > 1.0


def too_late(group):
    if group.rank == 1:
        with group.backend.compute("long"):
            pass
    try:
        group.barrier(timeout=5.0)
    except (echelon.Timeout, echelon.PeerFailed) as error:
        return str(error), group.backend.now()
    return None


def test_a_timeout_names_the_rank_that_is_behind():
    results = echelon.simulate(too_late, 3, costs={"long": 10.0}).results
    texts = [text for text, _ in results]
    assert any("waited 5.0 s for rank 1, which is before its first operation" in text for text in texts)
    assert [now for _, now in results] == [5.0, 10.0, 5.0]


def wait_with_an_impatient_rank(group):
    if group.rank == 1:
        with group.backend.compute("long"):
            pass
        return None
    with pytest.raises((echelon.Timeout, echelon.PeerFailed), match=r"waited 5\.0 s for rank 1"):
        group.barrier(timeout=5.0 if group.rank == 0 else None)
    return group.backend.now()


@pytest.mark.parametrize("way", WAYS)
def test_the_timeout_of_one_rank_ends_the_wait_of_the_others(way):
    run = echelon.simulate(wait_with_an_impatient_rank, 3, costs={"long": 10.0}, collectives=way)
    assert run.results == [5.0, None, 5.0]


def go_on_after_a_timeout(group):
    """A group of two gives up. The group of all goes on."""
    pair = group.subgroup([0, 1])
    if group.rank == 0:
        with pytest.raises(echelon.Timeout):
            pair.all_reduce(torch.ones(1), timeout=1.0)
    elif group.rank == 1:
        with group.backend.compute("long"):
            pass
        with pytest.raises(echelon.PeerFailed, match="waited"):
            pair.all_reduce(torch.ones(1))
    return group.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("way", WAYS)
def test_a_revoked_group_fails_alone(way):
    run = echelon.simulate(go_on_after_a_timeout, 3, costs={"long": 10.0}, collectives=way)
    assert run.results == [3.0, 3.0, 3.0]


def call_apart(group, calls):
    calls[group.rank](group)


CALLS = {
    "all_reduce(sum) of float32[4], #1": lambda group: group.all_reduce(torch.ones(4)),
    "all_reduce(max) of float32[4], #1": lambda group: group.all_reduce(torch.ones(4), "max"),
    "all_reduce(sum) of float32[5], #1": lambda group: group.all_reduce(torch.ones(5)),
    "broadcast(src=0) of float32[4], #1": lambda group: group.broadcast(torch.ones(4), 0),
    "broadcast(src=1) of float32[4], #1": lambda group: group.broadcast(torch.ones(4), 1),
    "all_gather of rows of float32[], #1": lambda group: group.all_gather(torch.ones(4)),
    "barrier, #1": lambda group: group.barrier(),
}


@pytest.mark.parametrize("odd", [0, 2])
def test_different_calls_are_told_with_both_lines(odd):
    for mine in CALLS:
        for theirs in set(CALLS) - {mine}:
            calls = [CALLS[mine]] * 3
            calls[odd] = CALLS[theirs]
            for seed in range(3):
                with pytest.raises(echelon.CollectiveMismatch) as caught:
                    echelon.simulate(call_apart, 3, (calls,), seed=seed)
                told = str(caught.value)
                for call in (mine, theirs):
                    line = CALLS[call].__code__.co_firstlineno
                    caller = call_apart.__code__.co_firstlineno + 1
                    where = f"{__file__}:{line}, called from {__file__}:{caller}"
                    assert f"{call} of group 'world' at {where} on rank" in told


def one_skips(group):
    if group.rank != 2:
        group.all_reduce(torch.ones(4))


def two_orders(group):
    first, second = group.subgroup([0, 1, 2], "first"), group.subgroup([0, 1, 2], "second")
    for one in (first, second) if group.rank == 0 else (second, first):
        one.barrier()


def one_receives(group):
    return group.recv(0) if group.rank == 1 else group.gather(torch.ones(1), 0)


@pytest.mark.parametrize(
    ("program", "texts"),
    [
        (
            one_skips,
            [
                "rank 0 waits for rank 2, which has returned: make both call the same operations",
                r"rank 0 waits for rank 2 in all_reduce\(sum\) of float32\[4\], #1 by \w+, at .*test_whole.py:",
                r"rank 1 waits for rank 2 in all_reduce\(sum\) of float32\[4\], #1 by \w+, at .*test_whole.py:",
                "rank 2 has returned, after no call",
            ],
        ),
        (
            two_orders,
            [
                "rank 0 -> rank 1 -> rank 0: they are in collectives of different groups: use the groups in",
                r"rank 0 waits for ranks 1 and 2 in barrier, #1 by \w+, of group 'first', at .*:.*: one.barrier\(\)",
                r"rank 1 waits for rank 0 in barrier, #1 by \w+, of group 'second', at",
                r"rank 2 waits for rank 0 in barrier, #1 by \w+, of group 'second', at",
            ],
        ),
        (
            one_receives,
            [
                "rank 0 -> rank 1 -> rank 0: with rank 0 in a collective and rank 1 in a message: make all ranks",
                r"rank 0 waits for rank 1 in gather\(dst=0\) of rows of float32\[\], #1 by \w+, at",
                "rank 1 waits for rank 0 in receive from rank 0, tag 0, at",
            ],
        ),
    ],
)
def test_a_deadlock_says_which_ranks_have_not_come(program, texts):
    with pytest.raises(echelon.DeadlockError) as caught:
        echelon.simulate(program, 3)
    told = str(caught.value)
    for text in texts:
        assert re.search(text, told), told
    assert program is not one_receives or "rank 2 waits" not in told  # it need not wait for the root


@pytest.mark.parametrize("way", WAYS)
def test_a_collective_that_nobody_waits_for_is_missed_at_the_end(way):
    def act(group):
        if group.rank == 0:
            group.broadcast(torch.ones(2), 0)

    with pytest.raises(echelon.CollectiveMismatch, match=r"rank 1 has returned without broadcast\(src=0\) of .*rank 0"):
        echelon.simulate(act, 2, collectives=way)


def use_disjoint_groups(group):
    """Each rank makes its own pair only, so both pairs have one context."""
    pair = group.subgroup([0, 1] if group.rank < 2 else [2, 3])
    return pair.all_reduce(torch.tensor([float(group.rank)])).item()


def test_disjoint_groups_with_one_context_do_not_meet():
    assert echelon.simulate(use_disjoint_groups, 4).results == [1.0, 1.0, 5.0, 5.0]


# Values and memory


def change_after(group):
    """Each rank overwrites its tensor when it is through, which may be long before the others are."""
    found = []
    for root in range(group.world_size):
        for call in ("broadcast", "reduce", "gather", "scatter", "all_gather", "all_to_all"):
            own = torch.arange(6.0) + 10 * group.rank
            if call in ("all_gather", "all_to_all"):
                result = getattr(group, call)(own)
            else:
                result = getattr(group, call)(own if call != "scatter" or group.rank == root else None, root)
            found.append(None if result is None else result.tolist())
            own.fill_(-1.0)
    return found


@pytest.mark.parametrize("network", [None, "1GbE"])
def test_a_rank_may_change_its_tensor_once_its_call_has_ended(network):
    slow = {seed: echelon.simulate(change_after, 5, seed=seed, network=network).results for seed in range(5)}
    wanted = echelon.simulate(change_after, 5, collectives="messages").results
    assert all(found == wanted for found in slow.values())


def results_are_apart(group):
    """Results of two ranks share no memory: each adds its rank to its own."""
    found = []
    for call in (group.all_gather, group.all_reduce, group.all_to_all, group.reduce_scatter):
        result = call(torch.ones(8))
        group.barrier()
        result += group.rank
        group.barrier()
        found.append(result.unique().tolist())
    return found


def test_every_rank_has_a_result_of_its_own():
    results = echelon.simulate(results_are_apart, 4).results
    assert results == [[[1.0 + rank], [4.0 + rank], [1.0 + rank], [4.0 + rank]] for rank in range(4)]


def train_like_fsdp(group, num_bytes):
    shard = torch.ones(num_bytes // 4 // group.world_size)
    whole = torch.empty(num_bytes // 4)
    for _ in range(4):
        group.all_gather(shard, out=whole, async_op=True).wait()
        group.reduce_scatter(whole, "mean", async_op=True).wait()
        group.broadcast(shard, 0)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_after_fifty_simulations(way):
    def run():
        echelon.simulate(train_like_fsdp, 4, (4096,), network="10GbE", collectives=way)

    run()
    gc.collect()
    gc.disable()  # neither by reference cycles
    tracemalloc.start()
    try:
        for _ in range(80):  # until Python's free lists are full
            run()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(50):
            run()
        assert tracemalloc.get_traced_memory()[0] - before < 25_000
    finally:
        tracemalloc.stop()
        gc.enable()


@contextmanager
def gone_without_the_collector(kind):
    """Inside, as many objects of a class come as go, without the collector of garbage."""

    def present():  # earlier tests may hold some, by the traceback of an error
        return sum(type(each) is kind for each in gc.get_objects())

    gc.disable()
    try:
        before = present()
        yield
        assert present() == before
    finally:
        gc.enable()


def test_a_collective_goes_with_its_last_result():
    with gone_without_the_collector(Meeting):
        echelon.simulate(lambda group: group.all_gather(torch.ones(8)), 3)


@pytest.mark.parametrize("way", WAYS)
def test_a_simulation_goes_with_its_result(way):
    with gone_without_the_collector(World):
        echelon.simulate(train_like_fsdp, 4, (4096,), network="10GbE", collectives=way)


def test_a_rank_takes_little_memory_beside_its_tensors():
    echelon.simulate(train_like_fsdp, 32, (4096,))
    tracemalloc.start()
    try:
        echelon.simulate(train_like_fsdp, 32, (4096,))
        assert tracemalloc.get_traced_memory()[1] / 32 < 200_000
    finally:
        tracemalloc.stop()


def test_the_tensors_of_a_collective_are_counted_once_for_their_rank():
    def act(group):
        group.all_gather(torch.ones(1000))

    # Its own 4,000 bytes, and the result.
    assert echelon.simulate(act, 3, memory=True).peak_memory == (16_000,) * 3
