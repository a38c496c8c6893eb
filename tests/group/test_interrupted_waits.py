"""Waits of real ranks into which something else comes: a signal's handler, Ctrl-C, threads that use the tensors."""

import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import echelon

SIZES = (3, 50_000, pytest.param(1_000_000, marks=pytest.mark.slow))
"""Elements: an all-reduce in one call of the native library, one in slots, and between the two."""
KINDS = ("all_reduce", "barrier", "exchange", "recv")
BACKENDS = ["shm", pytest.param("tcp", marks=pytest.mark.slow)]


def communicate(group, kind):
    """Blocks until rank 1 has come. Returns a number that is 2 if all is well."""
    if kind == "barrier":
        group.barrier()
        return 2.0
    if kind == "all_reduce":
        return group.all_reduce(torch.ones(3))[0].item()
    if kind == "exchange":
        return group.all_gather(torch.ones(3)).sum().item() / 3
    if group.rank == 1:
        group.send(torch.tensor([2.0]), 0)
        return 2.0
    return group.recv(1)[0].item()


def come_late(group, kind, place):
    """Rank 1 comes when a handler has run on rank 0, which waits for it. Returns the handler's delay and a number."""
    sign = Path(place)
    if group.rank == 1:
        until = time.monotonic() + 10.0
        while not sign.exists() and time.monotonic() < until:
            time.sleep(0.001)
        return sign.exists(), communicate(group, kind)
    delays, at = [], time.monotonic() + 0.03

    def note_delay(*_):
        delays.append(time.monotonic() - at)
        sign.touch()

    before = signal.signal(signal.SIGALRM, note_delay)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.03)
        number = communicate(group, kind)
    finally:
        signal.signal(signal.SIGALRM, before)
    return delays, number


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_runs_while_the_rank_waits(pool, backend, kind, tmp_path):
    (delays, first), (was_run, second) = pool.run(come_late, 2, kind, str(tmp_path / "sign"), backend=backend)
    assert was_run
    assert first == second == 2.0
    assert max(delays) < 2.0  # 20 ms at most on an idle machine, after which each sleep ends


def ask_in_a_handler(group, kind):
    """Rank 0 waits for rank 1, which comes when it has answered a message from a signal's handler of rank 0."""
    if group.rank == 1:
        group.send(group.recv(0, tag=5, timeout=10.0), 0, tag=6)
        return [5.0], communicate(group, kind)
    answers = []

    def ask(*_):
        group.send(torch.tensor([5.0]), 1, tag=5)
        answers.append(group.recv(1, tag=6, timeout=10.0).item())

    before = signal.signal(signal.SIGALRM, ask)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.03)
        return answers, communicate(group, kind)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("kind", ["all_reduce", "recv"])
def test_a_handler_communicates_while_the_rank_waits(pool, backend, kind):
    assert pool.run(ask_in_a_handler, 2, kind, backend=backend) == [([5.0], 2.0)] * 2


def reduce_in_a_handler(group):
    """A signal's handler of rank 0 calls the group in which the rank waits. Returns the error of each rank."""
    other = group.subgroup([0, 1])
    other.barrier()
    before = signal.signal(signal.SIGALRM, lambda *_: other.all_reduce(torch.ones(3)))
    try:
        if group.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.03)
        else:
            group.recv(0, timeout=10.0)
        other.all_reduce(torch.ones(3))
    except echelon.EchelonError as error:
        if group.rank == 0:
            group.send(torch.ones(1), 1)
        return f"{type(error).__name__}: {error}"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_handler_that_calls_the_group_that_waits_is_refused(pool):
    first, second = pool.run(reduce_in_a_handler, 2, backend="shm")
    assert first.startswith("DeadlockError: it was called inside of operation #2 of its group")
    assert second.startswith("PeerFailed: rank 0 failed: DeadlockError")


def press_ctrl_c(group, kind):
    """Rank 0 gets SIGINT while it waits; returns what each rank is told, and whether both still work together."""
    other = group.subgroup([0, 1])
    other.barrier()
    if group.rank == 1:
        group.recv(0, tag=7)
        try:
            communicate(group, kind)
        except echelon.PeerFailed as error:
            return error.rank, str(error), other.all_reduce(torch.ones(1)).item()
        return None, "", other.all_reduce(torch.ones(1)).item()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.03, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    timer.start()
    try:
        communicate(group, kind)
    except KeyboardInterrupt:
        said = "interrupted"
    finally:
        signal.signal(signal.SIGINT, before)
        timer.join()
    group.send(torch.ones(1), 1, tag=7)
    return said, other.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["all_reduce", "recv"])
def test_ctrl_c_ends_a_wait_and_the_others_learn_of_it(pool, backend, kind):
    (said, first), (failed, text, second) = pool.run(press_ctrl_c, 2, kind, backend=backend)
    assert said == "interrupted"
    assert first == second == 2.0
    if kind == "all_reduce":  # a message that is not received concerns nobody else
        assert failed == 0, text
        assert "KeyboardInterrupt" in text


def drop_tensors(group, size):
    """Nobody refers to the tensors while they travel, and their memory would be used again."""
    peer = 1 - group.rank
    works = []
    for number in range(4):
        works.append(group.all_reduce(torch.full((size,), float(number)), async_op=True))
        works.append(group.isend(torch.full((size,), 10.0 + number), peer))
        works.append(group.irecv(peer, out=torch.empty(size)))
    others = [torch.full((size,), -1.0) for _ in range(20)]
    results = [work.wait() for work in works]
    sums, received = results[0::3], results[2::3]
    return all(
        bool((sums[number] == 2 * number).all() and (received[number] == 10 + number).all()) for number in range(4)
    ) and all(bool((tensor == -1).all()) for tensor in others)


@pytest.mark.parametrize("size", SIZES)
def test_tensors_that_nobody_refers_to_live_as_long_as_their_operation(pool, size):
    assert pool.run(drop_tensors, 2, size, backend="shm") == [True, True]


def write_meanwhile(group, size):
    """Another thread writes 1 and 2 into the tensors of asynchronous calls. Returns all values that came about."""
    tensors = [torch.ones(size), torch.ones(size), torch.ones(size)]
    is_over = threading.Event()

    def keep_writing():
        while not is_over.is_set():
            for tensor in tensors:
                tensor.fill_(2.0).fill_(1.0)

    thread = threading.Thread(target=keep_writing)
    thread.start()
    peer, values = 1 - group.rank, set()
    try:
        for _ in range(10):
            works = [group.all_reduce(tensors[0], async_op=True), group.isend(tensors[1], peer)]
            works.append(group.irecv(peer, out=tensors[2]))
            for work in works:
                work.wait()
    finally:
        is_over.set()
        thread.join()
    values.update(value for tensor in tensors for value in tensor.unique().tolist())
    return sorted(values), group.all_reduce(torch.ones(size)).unique().tolist()


@pytest.mark.parametrize("size", SIZES)
def test_a_thread_that_writes_meanwhile_changes_values_and_nothing_else(pool, size):
    for values, later in pool.run(write_meanwhile, 2, size, backend="shm"):
        assert all(value == int(value) >= 1 for value in values), values  # sums of ones and twos
        assert later == [2.0]
