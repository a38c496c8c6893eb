"""What a Work answers: waited for twice, by two threads, with a time limit; and any number of them at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import echelon
from echelon.backends.simulated import SimulatedBackend
from echelon.group.group import ProcessGroup
from tests.helpers.worlds import tcp_world

SECONDS = 20.0


@pytest.fixture(params=["simulated", "tcp"])
def groups(request):
    """Gives the groups of two ranks in this process."""
    if request.param == "simulated":
        yield [ProcessGroup(backend, timeout=SECONDS) for backend in SimulatedBackend.create_group(2)]
        return
    with tcp_world(2) as world:
        yield [ProcessGroup(backend, timeout=SECONDS) for backend in world]


STARTS = {
    "all_reduce": lambda group: group.all_reduce(torch.ones(2), async_op=True),
    "irecv": lambda group: group.irecv(1 - group.rank),
}
ANSWERS = {
    "all_reduce": lambda group: group.all_reduce(torch.ones(2)),
    "irecv": lambda group: group.send(torch.full((2,), 2.0), 1 - group.rank),
}


@pytest.mark.parametrize("what", STARTS)
def test_a_time_limit_of_a_wait_does_not_end_the_operation(groups, what):
    work = STARTS[what](groups[0])
    assert not work.is_completed()
    assert work.exception() is None
    with pytest.raises(echelon.Timeout, match="still under way"):
        work.result()
    for _ in range(2):
        with pytest.raises(echelon.Timeout, match=r"not done after \d+\.\d s"):
            work.wait(0.01)
    ANSWERS[what](groups[1])
    for _ in range(2):
        assert work.wait().tolist() == [2.0, 2.0]
    assert work.is_completed()
    assert work.result() is work.wait(0.0)
    assert work.exception() is None


@pytest.mark.parametrize("what", STARTS)
def test_two_threads_wait_for_the_same(groups, what):
    work = STARTS[what](groups[0])
    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(work.wait) for _ in range(2)]
        ANSWERS[what](groups[1])
        first, second = (wait.result(SECONDS) for wait in waits)
    assert first is second
    assert first.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("what", STARTS)
def test_an_error_is_raised_at_every_call(groups, what):
    work = STARTS[what](groups[0])
    groups[1].abort("no coffee left")
    for ask in (work.wait, work.wait, work.result, lambda: work.wait(0.0)):
        with pytest.raises(echelon.PeerFailed, match="no coffee left") as caught:
            ask()
        assert caught.value.rank == 1
        assert caught.value is work.exception()
    assert work.is_completed()


def test_many_operations_of_several_threads_and_groups_at_once(groups):
    """Four threads a rank, each with a group of its own, fifty operations each under way, waited for in reverse."""
    parts = [[group.subgroup([0, 1]) for _ in range(4)] for group in groups]
    barrier = threading.Barrier(8)

    def play(part, number):
        barrier.wait(SECONDS)
        works = [part.all_reduce(torch.tensor(100 * number + turn), async_op=True) for turn in range(50)]
        messages = [part.isend(torch.tensor(turn), 1 - part.rank, tag=turn) for turn in range(50)]
        came = [part.irecv(1 - part.rank, tag=turn).wait().item() for turn in reversed(range(50))]
        sums = [work.wait().item() for work in reversed(works)]
        for message in messages:
            message.wait()
        return sums[::-1], came[::-1]

    with ThreadPoolExecutor(8) as threads:
        jobs = [(number, threads.submit(play, mine[number], number)) for mine in parts for number in range(4)]
        for number, job in jobs:
            sums, came = job.result(SECONDS)
            assert sums == [2 * (100 * number + turn) for turn in range(50)]
            assert came == list(range(50))
