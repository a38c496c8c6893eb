"""What a timeout says: for whom this rank waited, where that one is, and at which line."""

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import echelon
from echelon.calls import patience
from echelon.collectives import watch
from echelon.group import ProcessGroup
from tests.backends.forked import run_forked
from tests.backends.worlds import tcp_world

HERE = r"[^ ]*test_whereabouts\.py:\d+"


@pytest.fixture(params=["simulated", "tcp", "shm"])
def run(request):
    """Runs a function on a number of ranks and returns their results."""
    if request.param == "simulated":
        return lambda fn, world_size, *args: echelon.simulate(fn, world_size, args).results
    pool = request.getfixturevalue("pool")
    return lambda fn, world_size, *args: pool.run(fn, world_size, *args, backend=request.param)


def leave_others_waiting(group, behind):
    """All but one are in an all-reduce, and wait for each other or for that one."""
    group.barrier()
    others = [rank for rank in range(group.world_size) if rank != behind]
    if group.rank == behind:
        for src in others:
            group.recv(src, tag=7)
        return None
    with pytest.raises((echelon.Timeout, echelon.PeerFailed)) as caught:
        group.all_reduce(torch.ones(10), timeout=0.3)
    group.send(torch.ones(1), behind, tag=7)
    return str(caught.value)


@pytest.mark.parametrize("behind", [0, 2])
def test_the_rank_that_is_behind_is_named_and_not_one_that_waits_for_it(run, behind):
    for message in run(leave_others_waiting, 4, behind):
        if message is not None:
            assert re.search(
                rf"in all_reduce\(sum\) of float32\[10\], #2 of group 'world' at {HERE}: waited 0\.\d s for "
                rf"rank {behind}, which is in receive from rank \d, tag 7 of group 'world' at {HERE}; "
                r"ranks \d and \d have called it",
                message,
            ), message


def compute(group):
    group.barrier()
    if group.rank == 1:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            pass
        return None
    with pytest.raises(echelon.Timeout) as caught:
        group.barrier(timeout=0.05)
    return str(caught.value)


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_a_rank_that_computes_answers_with_its_line(pool, backend):
    message, _ = pool.run(compute, 2, backend=backend)
    line = compute.__code__.co_firstlineno
    assert re.search(rf"for rank 1, which is past barrier, #1 of group 'world' at {HERE}, now at {HERE}", message)
    assert int(message.rpartition(":")[2]) in (line + 4, line + 5)


def stop(group):
    """Rank 1 is stopped while it computes, after it has sent what rank 2 needed."""
    group.barrier()
    if group.rank == 1:
        group.all_reduce(torch.ones(3))
        group.send(torch.tensor(os.getpid()), 0, tag=1)
        return group.recv(0, tag=2).item()
    group.all_reduce(torch.ones(3))
    if group.rank == 2:
        return group.recv(0, tag=2).item()
    pid = group.recv(1, tag=1).item()
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(echelon.Timeout) as caught:
            group.broadcast(torch.ones(1), src=1, timeout=0.1)
    finally:
        os.kill(pid, signal.SIGCONT)
    for rank in (1, 2):
        group.send(torch.tensor(7), rank, tag=2)
    return str(caught.value)


def test_a_stopped_rank_is_named_with_what_was_heard_of_it_last():
    message, one, two = run_forked(stop, 3).values()
    assert (one, two) == (7, 7)
    assert "waited 0.1 s for rank 2, which is in receive from rank 0, tag 2" in message
    assert "and for rank 1, which has not answered for 2 s: computing without a pause, or stopped; " in message
    assert "its last message was of all_reduce(sum) of float32[3], #2 by recursive_doubling" in message


def wait_for_a_message(group):
    if group.rank == 1:
        group.recv(0, tag=3)
        return None
    with pytest.raises(echelon.Timeout) as caught:
        group.recv(1, timeout=0.2)
    group.send(torch.ones(1), 1, tag=3)
    return str(caught.value)


def test_a_message_that_does_not_come_says_where_its_sender_is(run):
    message = run(wait_for_a_message, 2)[0]
    assert re.fullmatch(
        rf"rank 0 in receive from rank 1, tag 0 of group 'world' at {HERE}: waited 0\.\d s for rank 1, which is in "
        rf"receive from rank 0, tag 3 of group 'world' at {HERE}",
        message,
    ), message


def test_a_long_wait_is_a_warning_that_says_where_the_other_is(monkeypatch, caplog):
    warned = threading.Event()
    caplog.handler.addFilter(lambda _: warned.set() or True)
    monkeypatch.setattr(watch, "WARN_SECONDS", 0.05)
    monkeypatch.setattr(patience, "WARN_SECONDS", 0.05)
    with tcp_world(2) as world, ThreadPoolExecutor(1) as thread:
        for backend in world:
            backend.doubts_after = 0.05
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
