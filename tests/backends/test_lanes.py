"""Asynchronous operations: one after another in a lane, lanes beside each other."""

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from echelon.backends.lanes import ThreadLanes
from echelon.errors import Closed, Timeout

SECONDS = 20.0


@pytest.fixture
def lanes():
    made = ThreadLanes("test", SECONDS)
    yield made
    made.close(SECONDS)


def test_a_lane_runs_in_order(lanes):
    order = []
    works = [lanes.start(lambda number=number: order.append(number), "append", 5) for number in range(50)]
    for work in works:
        work.wait(SECONDS)
    assert order == list(range(50))


def test_lanes_do_not_wait_for_each_other(lanes):
    come = threading.Event()
    first = lanes.start(lambda: come.wait(SECONDS), "wait", 0)
    second = lanes.start(come.set, "come", 1)
    second.wait(SECONDS)
    assert first.wait(SECONDS) is True


def test_an_operation_may_wait_for_what_is_queued_behind_it(lanes):
    """As a callback of a future does that begins another operation."""
    order = []

    def first():
        behind = [lanes.start(lambda number=number: order.append(number), "append", 3) for number in range(3)]
        behind[1].wait(SECONDS)
        order.append("first")

    lanes.start(first, "first", 3).wait(SECONDS)
    lanes.start(lambda: None, "last", 3).wait(SECONDS)
    assert order == [0, 1, "first", 2]


def test_an_error_belongs_to_its_operation_alone(lanes):
    failing = lanes.start(lambda: 1 // 0, "division", 0)
    after = lanes.start(lambda: 7, "seven", 0)
    assert after.wait(SECONDS) == 7
    assert isinstance(failing.exception(), ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        failing.wait(SECONDS)


def test_a_wait_ends_when_its_time_is_up(lanes):
    come = threading.Event()
    work = lanes.start(lambda: come.wait(SECONDS), "wait for it", 0)
    with pytest.raises(Timeout, match=r"wait for it: not done after \d+\.\d s"):
        work.wait(0.01)
    come.set()
    assert work.wait(SECONDS)


def test_a_lane_that_rests_holds_no_tensor(lanes):
    """It kept the last operation, and with it its tensors, until the next one came."""
    tensor = torch.ones(1)
    gone = weakref.ref(tensor)
    work = lanes.start(lambda tensor=tensor: tensor.sum().item(), "sum", 0)
    assert work.wait(SECONDS) == 1
    del tensor, work
    lanes.close(SECONDS)
    gc.collect()
    assert gone() is None


def test_closing_runs_what_is_queued_and_leaves_no_thread():
    before = threading.active_count()
    lanes = ThreadLanes("test", SECONDS)
    works = [lanes.start(lambda number=number: number, "number", number % 3) for number in range(9)]
    lanes.close(SECONDS)
    assert [work.result() for work in works] == list(range(9))
    assert threading.active_count() == before


_CLOSES_ITSELF = """
import time
from echelon.backends.lanes import ThreadLanes
lanes = ThreadLanes("this backend", 10.0)
def close():
    lanes.close(10.0)
    began.append(1)
    time.sleep(0.5)
    print("ended", flush=True)
began = []
lanes.start(close, "close")
while not began:
    time.sleep(0.01)
"""


def test_the_end_of_the_program_waits_for_a_lane_that_closes_all():
    """The process aborted now and then if a callback of a future had destroyed the process group."""
    ended = subprocess.run([sys.executable, "-c", _CLOSES_ITSELF], capture_output=True, text=True, timeout=50)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("ended\n", "", 0)


def test_nothing_is_queued_behind_the_end():
    """It would never have run, and a wait for it only ended when its time was up."""
    lanes = ThreadLanes("test", SECONDS)
    lanes.start(lambda: 1, "one", 0).wait(SECONDS)
    lanes.close(SECONDS)
    with pytest.raises(Closed):
        lanes.start(lambda: 2, "two", 0)


def test_a_lane_runs_beside_its_caller_until_somebody_waits_for_it(lanes):
    began = threading.Event()

    def job():
        beside = lanes.runs_beside()
        began.set()
        while lanes.runs_beside():
            pass
        return beside

    work = lanes.start(job, "job", 0)
    assert began.wait(10)
    assert not lanes.runs_beside(), "the caller is no lane"
    assert work.wait(10) is True


def test_a_lane_that_is_idle_for_long_ends_its_thread_and_begins_again(monkeypatch):
    """A program that makes a group for each step would else keep a thread of each."""
    monkeypatch.setattr("echelon.backends.lanes.IDLE_SECONDS", 0.001)
    lanes = ThreadLanes("rank 0", 10.0)
    before = set(threading.enumerate())
    for lane in range(20):
        assert lanes.start(lambda lane=lane: lane, "job", lane).wait() == lane
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
            assert not thread.is_alive()
    assert lanes.start(lambda: "again", "job", 3).wait() == "again"
    lanes.close(10)
    assert set(threading.enumerate()) <= before


def test_no_job_is_lost_to_a_lane_that_ends(monkeypatch):
    monkeypatch.setattr("echelon.backends.lanes.IDLE_SECONDS", 0.0)
    lanes = ThreadLanes("rank 0", 10.0)
    works = [lanes.start(lambda number=number: number, "job", number % 2) for number in range(2000)]
    assert [work.wait() for work in works] == list(range(2000))
    lanes.close(10)
