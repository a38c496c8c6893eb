"""What a timeout says: for whom this rank waited, where that one is, and at which line."""

import os
import re
import signal
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import echelon
from echelon.backends.status import Standing, Status
from echelon.collectives.calls import hang_diagnosis
from echelon.group import message_wait
from echelon.group.group import ProcessGroup
from echelon.operation_records import FlightRecorder
from tests.helpers.forked_ranks import run_forked
from tests.helpers.worlds import tcp_world

HERE = r"[^ ]*test_whereabouts\.py:\d+(?:, called from [^ ]*test_whereabouts\.py:\d+)?"


ASKS = 1
"""The rank whose time runs out first: it begins to wait when all others have told it that they are where they are."""
TOLD, STAY = 8, 7
"""Tags: of what tells it so, and of what lets the others go on."""


def stay(group):
    """Is in a receive until the rank that asks has asked."""
    waiting = group.irecv(ASKS, tag=STAY)
    group.send(torch.ones(1), ASKS, tag=TOLD)
    waiting.wait()


def leave_others_waiting(group, behind):
    """All but one are in an all-reduce, and wait for each other or for that one."""
    group.barrier()
    if group.rank == behind:
        stay(group)
        return None
    if group.rank != ASKS:
        work = group.all_reduce(torch.ones(10), async_op=True)
        group.send(torch.ones(1), ASKS, tag=TOLD)
        with pytest.raises(echelon.PeerFailed) as caught:
            work.wait()
        return str(caught.value)
    for src in range(group.world_size):
        if src != ASKS:
            group.recv(src, tag=TOLD)
    with pytest.raises(echelon.Timeout) as caught:
        group.all_reduce(torch.ones(10), timeout=0.05)
    group.send(torch.ones(1), behind, tag=STAY)
    return str(caught.value)


@pytest.mark.parametrize("behind", [0, 2])
def test_the_rank_that_is_behind_is_named_and_not_one_that_waits_for_it(on_backend, behind):
    messages = on_backend(leave_others_waiting, 4, behind)
    wanted = (
        rf"rank {ASKS} in all_reduce\(sum\) of float32\[10\], #2 of group 'world' at {HERE}: waited \d+\.\d s for "
        rf"rank {behind}, which is in receive from rank {ASKS}, tag {STAY} of group 'world' at {HERE}; "
        rf"ranks {2 - behind} and 3 have called it"
    )
    for rank, message in enumerate(messages):
        assert rank == behind or re.search(wanted, message), message


def use_groups_in_turn(group):
    """Each rank is in a collective of another group of both."""
    first, second = (group.subgroup([0, 1], name=name) for name in ("first", "second"))
    if group.rank != ASKS:
        work = first.all_reduce(torch.ones(2), async_op=True)
        group.send(torch.ones(1), ASKS, tag=TOLD)
        work.wait()
        return None
    group.recv(0, tag=TOLD)
    with pytest.raises(echelon.Timeout) as caught:
        second.barrier(timeout=0.05)
    first.all_reduce(torch.ones(2))
    return str(caught.value)


def test_a_rank_in_a_collective_of_another_group_has_advice(on_backend):
    message = next(filter(None, on_backend(use_groups_in_turn, 2)))
    assert re.search(r"rank 0, which is in .*all_reduce\(sum\) of float32\[2\], #1 of group 'first'", message), message
    assert "use groups in the same order on every rank, if these wait for each other" in message


def wait_for_each_other(group, is_async):
    """Each rank calls a collective of one group, and the other rank one of the other group."""
    first, second = (group.subgroup([0, 1], name=name) for name in ("first", "second"))
    mine = first if group.rank else second
    with pytest.raises((echelon.CollectiveMismatch, echelon.PeerFailed)) as caught:
        mine.all_reduce(torch.ones(3), async_op=True).wait() if is_async else mine.all_reduce(torch.ones(3))
    return str(caught.value)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_ranks_that_wait_for_each_other_in_two_groups_are_told_long_before_a_timeout(pool, backend, is_async):
    messages = pool.run(wait_for_each_other, 2, is_async, backend=backend)
    call = rf"all_reduce\(sum\) of float32\[3\], #1 of group '{{}}' at {HERE}"
    names = "second", "first"
    wanted = [
        f"{call.format(names[rank])} on rank {rank} waits for rank {1 - rank}, which waits for this rank in "
        f"{call.format(names[1 - rank])}: use the groups in the same order on every rank"
        for rank in (0, 1)
    ]
    assert any(map(re.search, wanted, messages)), messages


def wait_in_a_circle(group, is_async):
    """Each rank calls a collective of the group with the next rank, which is in that with the one after it."""
    size = group.world_size
    pairs = [group.subgroup(sorted((rank, (rank + 1) % size)), name=f"pair {rank}") for rank in range(size)]
    group.barrier()
    mine = pairs[group.rank]
    with pytest.raises((echelon.CollectiveMismatch, echelon.PeerFailed)) as caught:
        mine.all_reduce(torch.ones(3), async_op=True).wait() if is_async else mine.all_reduce(torch.ones(3))
    return str(caught.value)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_ranks_that_wait_for_each_other_in_a_circle_of_groups_are_told_long_before_a_timeout(pool, backend, is_async):
    messages = pool.run(wait_in_a_circle, 4, is_async, backend=backend)
    wanted = []
    for rank in range(4):
        call = rf"all_reduce\(sum\) of float32\[3\], #1 of group 'pair {{}}' at {HERE}"
        one, two, three = ((rank + step) % 4 for step in (1, 2, 3))
        wanted.append(
            f"{call.format(rank)} on rank {rank} waits for rank {one}, which waits for rank {two} in "
            f"{call.format(one)}, which waits for rank {three} in {call.format(two)}, which waits for this rank in "
            f"{call.format(three)}: use the groups in the same order on every rank"
        )
    assert any(map(re.search, wanted, messages)), messages


def wait_in_a_row(group):
    """Each rank waits for the next one, and the last one comes late."""
    pairs = [group.subgroup([rank, rank + 1], name=f"pair {rank}") for rank in range(group.world_size - 1)]
    if group.rank == group.world_size - 1:
        time.sleep(3.5)
    mine = [pair for pair in reversed(pairs) if pair is not None]
    return [pair.all_reduce(torch.ones(3))[0].item() for pair in mine]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_a_row_of_waits_is_no_deadlock(pool, backend):
    assert pool.run(wait_in_a_row, 3, backend=backend) == [[2.0], [2.0, 2.0], [2.0]]


def wait_in_two_threads(group):
    first, second = (group.subgroup([0, 1], name=name) for name in ("first", "second"))
    with ThreadPoolExecutor() as executor:
        if group.rank == 0:
            beside = executor.submit(first.all_reduce, torch.ones(3))
            group.recv(1)  # after rank 1 has looked for rank 0, in the second group
        else:
            executor.submit(send_late, group)
            second_sum = second.all_reduce(torch.ones(3))
            return second_sum[0].item(), first.all_reduce(torch.ones(3))[0].item()
        return second.all_reduce(torch.ones(3))[0].item(), beside.result()[0].item()


def call_later(first):
    time.sleep(3.5)
    return first.all_reduce(torch.ones(3))


def make_the_first_call_in_another_thread(group):
    first, second = (group.subgroup([0, 1], name=name) for name in ("first", "second"))
    if group.rank == 0:
        return first.all_reduce(torch.ones(3))[0].item(), second.all_reduce(torch.ones(3))[0].item()
    with ThreadPoolExecutor() as executor:
        later = executor.submit(call_later, first)
        second_sum = second.all_reduce(torch.ones(3))[0].item()
        return later.result()[0].item(), second_sum


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_a_call_to_come_of_another_thread_is_no_deadlock(pool, backend):
    assert pool.run(make_the_first_call_in_another_thread, 2, backend=backend) == [(2.0, 2.0)] * 2


def send_late(group):
    time.sleep(3.5)
    group.send(torch.ones(1), 0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_groups_of_two_threads_are_no_deadlock(pool, backend):
    assert pool.run(wait_in_two_threads, 2, backend=backend) == [(2.0, 2.0)] * 2


def compute(group, folder):
    """Rank 1 computes, from before rank 0 asks until it has been answered."""
    began, answered = (os.path.join(folder, name) for name in ("began", "answered"))
    group.barrier()
    if group.rank == 1:
        Path(began).touch()
        while not os.path.exists(answered):
            pass
        return None
    while not os.path.exists(began):
        time.sleep(0.001)
    with pytest.raises(echelon.Timeout) as caught:
        group.barrier(timeout=0.05)
    Path(answered).touch()
    return str(caught.value)


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_a_rank_that_computes_answers_with_its_line(pool, backend, tmp_path):
    message, _ = pool.run(compute, 2, str(tmp_path), backend=backend)
    line = compute.__code__.co_firstlineno
    assert re.search(rf"for rank 1, which is past barrier, #1 of group 'world' at {HERE}, now at {HERE}", message)
    assert line + 5 <= int(message.rpartition(":")[2]) <= line + 7


def stop(group):
    """Rank 0 is stopped while it waits, after it has sent what rank 2 needed."""
    group.barrier()
    group.all_reduce(torch.ones(3))
    if group.rank == 0:
        group.send(torch.tensor(os.getpid()), ASKS, tag=1)
        return group.recv(ASKS, tag=STAY).item()
    if group.rank == 2:
        stay(group)
        return 7
    pid = group.recv(0, tag=1).item()
    group.recv(2, tag=TOLD)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(echelon.Timeout) as caught:
            group.broadcast(torch.ones(1), src=0, timeout=0.1)
    finally:
        os.kill(pid, signal.SIGCONT)
    for rank in (0, 2):
        group.send(torch.tensor(7), rank, tag=STAY)
    return str(caught.value)


def test_a_stopped_rank_is_named_with_what_was_heard_of_it_last():
    zero, message, two = run_forked(stop, 3).values()
    assert (zero, two) == (7, 7)
    assert re.search(rf"waited \d+\.\d s for rank 2, which is in receive from rank {ASKS}, tag {STAY}", message)
    assert "and for rank 0, which did not answer rank 1 within 2 s: computing without a pause, or stopped; " in message
    assert "its last message was of all_reduce(sum) of float32[3], #2 of group 'world'" in message


def receive_from_the_wrong_rank(group):
    if group.rank != ASKS:
        if group.rank == 0:
            group.send(torch.ones(1), ASKS)
        stay(group)
        return None
    for src in (0, 2):
        group.recv(src, tag=TOLD)
    with pytest.raises(echelon.Timeout) as caught:
        group.recv(2, timeout=0.05)
    for dst in (0, 2):
        group.send(torch.ones(1), dst, tag=STAY)
    group.recv(0)
    return str(caught.value)


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_a_message_that_no_receive_takes_is_named(pool, backend):
    message = pool.run(receive_from_the_wrong_rank, 3, backend=backend)[ASKS]
    assert message.endswith("; no receive takes a message from rank 0, tag 0: make both sides agree on rank and tag")


def wait_for_a_message(group):
    if group.rank != ASKS:
        stay(group)
        return None
    group.recv(0, tag=TOLD)
    with pytest.raises(echelon.Timeout) as caught:
        group.recv(0, timeout=0.05)
    group.send(torch.ones(1), 0, tag=STAY)
    return str(caught.value)


def test_a_message_that_does_not_come_says_where_its_sender_is(on_backend):
    message = on_backend(wait_for_a_message, 2)[ASKS]
    assert re.fullmatch(
        rf"rank 1 in receive from rank 0, tag 0 of group 'world' at {HERE}: waited \d+\.\d s for rank 0, which is in "
        rf"receive from rank 1, tag {STAY} of group 'world' at {HERE}",
        message,
    ), message


def test_a_long_wait_is_a_warning_that_says_where_the_other_is(monkeypatch, caplog):
    warned = threading.Event()
    caplog.handler.addFilter(lambda _: warned.set() or True)
    monkeypatch.setattr(hang_diagnosis, "WARN_SECONDS", 0.05)
    monkeypatch.setattr(message_wait, "WARN_SECONDS", 0.05)
    with tcp_world(2) as world, ThreadPoolExecutor(1) as thread:
        for backend in world:
            backend.query_peers_after = 0.05
        groups = [ProcessGroup(backend, timeout=20) for backend in world]
        for call, answer in (
            (lambda: groups[0].barrier(), groups[1].barrier),
            (lambda: groups[0].recv(1), lambda: groups[1].send(torch.ones(1), 0)),
        ):
            caplog.clear()
            waiting = thread.submit(call)
            warned.wait(20)
            warned.clear()
            answer()
            waiting.result()
            (text, *_) = [record.getMessage() for record in caplog.records]
            assert re.search(rf"rank 0 in .* at {HERE}: waited \d\.\d s for rank 1, which is ", text), text


def test_warnings_come_once_a_minute_while_the_awaited_rank_is_in_another_group(caplog):
    """They came at each look, which is every 2 s then: thousands of lines until the timeout."""
    now = 0.0
    status = Status(Standing.ELSEWHERE, "in a collective of another group")
    backend = SimpleNamespace(
        rank=0,
        query_peers_after=1.0,
        now=lambda: now,
        control=SimpleNamespace(ask=lambda ranks, *_: dict.fromkeys(ranks, status), separation=lambda _: ""),
        flight_recorder=FlightRecorder(),
    )
    flight = backend.flight_recorder.begin("world", 1, 1, 1, "barrier")
    flight.thread = -1  # no thread of the program, so that no deadlock is looked for
    watch = hang_diagnosis.HangDiagnosis(backend, [0, 1], flight, 0.0)
    looks = 0
    while now < 630:
        now = watch.next_check_at
        watch.look(1, lambda: False)
        looks += 1
    assert looks > 300, "it looks every 2 s"
    assert len(caplog.records) == 10


def time_out_in_the_first_collective(group):
    if group.rank != ASKS:
        stay(group)
        return ""
    group.recv(0, tag=TOLD)
    with pytest.raises(echelon.Timeout) as caught:
        group.all_reduce(torch.ones(1), timeout=0.2)
    group.send(torch.ones(1), 0, tag=STAY)
    return "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_the_traceback_of_a_timeout_has_no_internal_numbers(pool, backend):
    shown = pool.run(time_out_in_the_first_collective, 2, backend=backend)[ASKS]
    assert "in all_reduce(sum) of float32[1], #1 of group 'world'" in shown
    assert "operation" not in shown.replace("operation_records", "")
    assert "direct cause" not in shown
