"""Ranks that block outside of the scheduler: told, not waited for. Ranks that wait for the outside: left alone."""

import functools
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import echelon
from echelon.simulation import native_wait, watchdog

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the number of a futex call")


@pytest.fixture
def pipe():
    """Reading and writing end of a pipe."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def thread():
    """Starts a thread that waits in a function until the end of the test, and returns its native number."""
    ends = []

    def start(function, end):
        started = threading.Thread(target=function, daemon=True)
        started.start()
        ends.append((started, end))
        deadline = time.monotonic() + 20
        while native_wait.native_wait(started.native_id) is None or not sleeps(started):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return started.native_id

    def sleeps(started):
        with open(f"/proc/self/task/{started.native_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "S"

    yield start
    for started, end in ends:
        end()
        started.join(20)


def test_a_lock_is_an_endless_wait_for_a_thread(thread):
    lock = threading.Lock()
    lock.acquire()
    wait = native_wait.native_wait(thread(lock.acquire, lock.release))
    assert wait.is_futex
    assert wait.is_endless
    assert native_wait.waiting_code(wait) == ""


def test_a_lock_with_a_timeout_ends(thread):
    lock = threading.Lock()
    lock.acquire()
    wait = native_wait.native_wait(thread(lambda: lock.acquire(timeout=60), lock.release))
    assert (wait.is_futex, wait.is_endless) == (True, False)


def test_a_pipe_is_no_wait_for_a_thread(pipe, thread):
    reader, writer = pipe
    wait = native_wait.native_wait(thread(lambda: os.read(reader, 1), lambda: os.write(writer, b"x")))
    assert not wait.is_futex


def test_the_function_of_a_library_is_named(thread):
    store = dist.HashStore()
    wait = native_wait.native_wait(thread(lambda: store.wait(["key"]), lambda: store.set("key", "")))
    assert re.fullmatch(r"c10d::HashStore::\w+ in libtorch_cpu\.so", native_wait.waiting_code(wait))


def blocked_by_a_lock(lock):
    def program(group):
        with lock:
            group.barrier()

    return program


def test_a_lock_that_another_rank_holds_is_told_with_all_places(monkeypatch):
    monkeypatch.setattr(watchdog, "PATIENCE", 0.5)
    # The test runner has threads of its own that wait for pipes.
    monkeypatch.setattr(watchdog.Watchdog, "_waits_outside", lambda *_: False)
    before = threading.active_count()
    with pytest.raises(echelon.DeadlockError) as caught:
        echelon.simulate(blocked_by_a_lock(threading.Lock()), 2)
    first, second = str(caught.value).split("\n")
    assert re.match(
        r"no rank can go on at 0 s: rank \d waits for another thread outside of Echelon, at .*test_watchdog.py:\d+: "
        r"with lock: \(futex",
        first,
    )
    assert re.match(r"  rank \d waits for rank \d in barrier, #1 .*: group.barrier\(\)", second)
    assert threading.active_count() == before, "the lock is released when the other rank leaves"


def test_a_wait_without_a_line_of_the_program_is_at_its_end(monkeypatch):
    """As in an exit handler. The line was "unknown"."""
    monkeypatch.setattr(watchdog, "PATIENCE", 0.5)
    with pytest.raises(echelon.DeadlockError, match=r"at the end of its function, in .*threading.py:\d+"):
        echelon.simulate(functools.partial(threading.Event().wait, None), 1)


_PROFILED = """
import sys, threading, echelon
from echelon.simulation import watchdog
watchdog.PATIENCE = 0.5
try:
    echelon.simulate(lambda group: threading.Event().wait(), 1)
except echelon.DeadlockError:
    pass
sys.setprofile(lambda *_: None)
(lambda: None)()
sys.setprofile(None)
print("ended")
"""


def test_a_profiler_goes_on_after_a_rank_that_sleeps_for_ever():
    """In Python 3.11 each function under one waited for ever, as in `foresee(until=)`: an exception was pending."""
    ended = subprocess.run([sys.executable, "-c", _PROFILED], capture_output=True, text=True, timeout=45)
    assert ended.stdout == "ended\n", ended.stderr


@pytest.mark.slow
def test_a_wait_is_told_by_default_after_seconds():
    def program(group):
        if group.rank == 1:
            threading.Event().wait()
        group.barrier()

    began = time.monotonic()
    with pytest.raises(echelon.DeadlockError, match=r"rank 1 waits for another thread .*threading.py:"):
        echelon.simulate(program, 2)
    assert 5 <= time.monotonic() - began < 20


def test_a_helper_thread_that_waits_for_the_outside_is_awaited(pipe, monkeypatch):
    """The rank waits for a thread, and the thread for a file, a child or the network."""
    monkeypatch.setattr(watchdog, "PATIENCE", 0.5)
    reader, writer = pipe

    def program(group):
        results = []
        helper = threading.Thread(target=lambda: results.append(os.read(reader, 1)))
        helper.start()
        closer = threading.Timer(1.0, os.write, (writer, b"x"))
        closer.start()
        helper.join()
        closer.join()
        return results

    assert echelon.simulate(program, 1).results == [[b"x"]]


def test_computing_and_sleeping_is_no_block(monkeypatch):
    monkeypatch.setattr(watchdog, "PATIENCE", 0.1)

    def program(group):
        time.sleep(0.8)
        deadline = time.monotonic() + 0.8
        while time.monotonic() < deadline:
            torch.ones(1000).sum()
        return group.rank

    assert echelon.simulate(program, 1).results == [0]


def test_an_interruption_says_where_the_ranks_are():
    def program(group):
        if group.rank == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            while True:
                sum(range(100))
        group.barrier()

    with pytest.raises(KeyboardInterrupt) as caught:
        echelon.simulate(program, 2, seed=3)
    note = "\n".join(caught.value.__notes__)
    assert re.search(r"rank 1 runs, at .*test_watchdog.py:\d+: ", note)
    assert re.search(r"rank 0 (has not begun|waits for rank 1 in barrier)", note)
