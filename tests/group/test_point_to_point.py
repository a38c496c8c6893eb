"""What one rank says to another, on simulated ranks and on real processes."""

import os
import signal
from collections import Counter

import pytest
import torch

import echelon
from echelon import PeerFailed, RecvFrom, SendTo
from echelon.testing import RaceError, RankPool, check_same_results


def collect_from_all(group):
    """Rank 0 takes ten numbers of every other rank, in whatever order they come."""
    if group.rank:
        for number in range(10):
            group.send(torch.tensor([number]), 0, tag=7)
        return None
    came = [group.recv_any(tag=7) for _ in range(10 * (group.world_size - 1))]
    return [(received.src, received.tag, received.tensor.item()) for received in came]


def test_recv_any_takes_from_every_rank_in_the_order_it_sent(run):
    came = run(collect_from_all, 4)[0]
    assert Counter(src for src, _, _ in came) == {1: 10, 2: 10, 3: 10}
    for rank in (1, 2, 3):
        assert [number for src, _, number in came if src == rank] == list(range(10))
    assert {tag for _, tag, _ in came} == {7}


def take_in_turn(group):
    """Everything has arrived before rank 0 asks: it is told on a tag of its own, which comes behind."""
    if group.rank:
        for number in range(20 if group.rank == 1 else 2):
            group.send(torch.tensor([number]), 0)
        group.send(torch.ones(()), 0, tag=1)
        return None
    for src in range(1, group.world_size):
        group.recv(src, tag=1)
    return [group.recv_any().src for _ in range(24)]


def test_no_rank_keeps_another_waiting_by_sending_much(run):
    order = run(take_in_turn, 4)[0]
    assert order == [1, 2, 3, 1, 2, 3] + [1] * 18


def ranks_of_a_subgroup(group):
    part = group.subgroup([3, 1, 2])
    if part is None:
        group.send(torch.tensor([100]), 2)
        return group.recv_any().src
    if part.rank == 2:
        sources = sorted(part.recv_any().src for _ in range(2))
        assert group.recv_any().tensor.item() == 100
        return sources
    part.send(torch.tensor([part.rank]), 2)
    if part.rank == 0:
        group.send(torch.tensor([1]), 0)
    return None


def test_recv_any_takes_only_from_its_group_and_names_its_ranks(run):
    assert run(ranks_of_a_subgroup, 4) == [3, None, [0, 1], None]


def time_out(group):
    if group.rank == 0:
        with pytest.raises(echelon.Timeout, match="receive from any rank"):
            group.recv_any(timeout=0.05)
    group.barrier()
    if group.rank == 1:
        group.send(torch.tensor([5]), 0)
    return group.recv_any().tensor.item() if group.rank == 0 else None


def test_a_timeout_loses_nothing(run):
    assert run(time_out, 2)[0] == 5


def survive_deaths(group):
    """Ranks 1 and 2 leave with an error after a message; rank 3 goes on, then closes."""
    if group.rank in (1, 2):
        group.send(torch.tensor([group.rank]), 0)
        group.recv(0, tag=9)
        group.abort(f"no coffee for {group.rank}")
        return None
    if group.rank == 3:
        group.recv(0, tag=9)
        group.send(torch.tensor([3]), 0, tag=2)
        group.send(torch.tensor([3]), 0)
        group.close()
        return None
    log = [group.recv_any().src for _ in range(2)]
    for rank in (1, 2):
        group.send(torch.ones(()), rank, tag=9)
    for _ in range(2):
        with pytest.raises(PeerFailed, match="no coffee") as caught:
            group.recv_any()
        assert "(noticed by rank 0 in receive from any rank" in str(caught.value)
        assert "test_point_to_point.py:" in str(caught.value)
        log.append(-caught.value.rank)
    group.send(torch.ones(()), 3, tag=9)
    log.append(group.recv_any().src)
    with pytest.raises(PeerFailed, match=r"it has closed its group, .* and no rank is left that could send"):
        group.recv_any()
    log.append(group.recv_any(tag=2).src)
    return log


def test_each_death_is_told_once_and_the_others_go_on(run):
    log = run(survive_deaths, 4)[0]
    assert sorted(log[:2]) == [1, 2]
    assert sorted(log[2:4]) == [-2, -1]
    assert log[4:] == [3, 3]


def kill_a_worker(group, path):
    if group.rank == 1:
        group.recv(0)
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 2:
        group.recv(0)
        group.send(torch.tensor([2]), 0)
        return
    works = [group.irecv_any() for _ in range(2)]
    group.send(torch.ones(()), 1)
    with pytest.raises(PeerFailed) as caught:
        works[0].wait()
    group.send(torch.ones(()), 2)
    path.write_text(f"{caught.value.rank} died, {works[1].wait().src} lives")


@pytest.mark.slow
def test_a_process_that_is_killed_ends_one_receive_and_not_the_others(tmp_path):
    with RankPool() as own, pytest.raises(PeerFailed, match="rank 1"):
        own.run(kill_a_worker, 3, tmp_path / "told")
    assert (tmp_path / "told").read_text() == "1 died, 2 lives"


def who_is_first(group):
    if group.rank:
        group.send(torch.tensor([group.rank]), 0)
        return None
    return [group.recv_any().src for _ in range(2)]


def test_every_order_is_tried_by_the_simulation_and_seen_as_a_race():
    orders = {tuple(echelon.simulate(who_is_first, 3, seed=seed).results[0]) for seed in range(20)}
    assert orders == {(1, 2), (2, 1)}
    with pytest.raises(RaceError, match="rank 0 returned"):
        check_same_results(who_is_first, 3, seeds=range(20))


def wait_for_anybody(group):
    return group.recv_any() if group.rank == 0 else None


def test_a_simulation_says_who_waits_for_anybody():
    with pytest.raises(echelon.DeadlockError, match="rank 0 waits for any rank in receive from any rank, tag 0"):
        echelon.simulate(wait_for_anybody, 2)


def serve(group):
    """Rank 0 hands out numbers until all are done, though a worker may die."""
    if group.rank:
        try:
            while group.sendrecv(torch.tensor([group.rank]), 0, 0).item() >= 0:
                pass
        except PeerFailed:
            return "left alone"
        return "done"
    handed, alive = 0, set(range(1, group.world_size))
    while alive:
        try:
            src = group.recv_any().src
        except PeerFailed as error:
            alive.discard(error.rank)
            continue
        handed += handed < 8
        group.send(torch.tensor([handed if handed < 8 else -1]), src)
        if handed == 8:
            alive.discard(src)
    return handed


def test_a_server_outlives_its_workers_under_every_seed():
    for kill_at in range(1, 8):
        faults = [echelon.Kill(rank=2, at_op=kill_at)]
        for seed in range(10):
            assert echelon.simulate(serve, 4, seed=seed, faults=faults).results[0] == 8


def shift(group):
    right, left = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    mine = torch.full((3,), float(group.rank))
    out = torch.zeros(3)
    assert group.sendrecv(mine, right, left, tag=4, out=out) is out
    swapped = (
        group.sendrecv(torch.tensor(group.rank), group.rank ^ 1, group.rank ^ 1) if group.world_size == 4 else None
    )
    return out.tolist(), swapped


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sendrecv_shifts_around_a_ring(run, world_size):
    for rank, (came, swapped) in enumerate(run(shift, world_size)):
        assert came == [(rank - 1) % world_size] * 3
        assert swapped is None or swapped.item() == rank ^ 1


def send_and_receive_at_once(group):
    others = [rank for rank in range(group.world_size) if rank != group.rank]
    place = torch.zeros(2)
    messages = [SendTo(torch.tensor([group.rank, dst], dtype=torch.float32), dst, tag=dst) for dst in others]
    messages += [RecvFrom(src, group.rank, place if src == others[0] else None) for src in others]
    works = group.batch_isend_irecv(messages)
    values = [work.wait() for work in works]
    assert values[len(others)] is place
    return [value if value is None else value.tolist() for value in values]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_batch_sends_and_receives_at_once(run, world_size):
    for rank, values in enumerate(run(send_and_receive_at_once, world_size)) if world_size > 1 else ():
        others = [other for other in range(world_size) if other != rank]
        assert values == [None] * len(others) + [[src, rank] for src in others]


def start_half_a_batch(group):
    other = 1 - group.rank
    wrong = (
        SendTo(torch.ones(1), group.rank),
        SendTo(torch.ones(1), 2),
        SendTo(torch.ones(1), other, -1),
        SendTo(torch.ones(1, device="meta"), other),
        RecvFrom(group.rank),
        RecvFrom(other, out=torch.zeros(2, 2).t()),
    )
    for message in wrong:
        with pytest.raises(echelon.EchelonError):
            group.batch_isend_irecv([SendTo(torch.tensor([1.0]), other), message])
    return group.sendrecv(torch.tensor([2.0]), other, other).item()


def test_a_batch_with_a_mistake_starts_nothing(run):
    assert run(start_half_a_batch, 2) == [2.0, 2.0]


def alone(group):
    group.recv_any()


def test_recv_any_needs_somebody_who_could_send(run):
    with pytest.raises(echelon.InvalidWorldSize, match="nobody who could send"):
        run(alone, 1)
