"""Messages in shared memory, with the threads of two ranks in every order that chance finds, or one after the other.

The ends are the real ones, with rings and parts so small that everything happens: rings are full, their end is passed
over, messages go round in circles, parts are used again, ranks sleep. What is missing is the processor's own order of
loads and stores, of which the documents say what is relied on.
"""

import itertools
import os

import pytest

from echelon.backends.shared.memory.segment import Segment
from echelon.backends.shared.messages import message_region
from tests.helpers import shared_memory_scenarios
from tests.helpers.shared_memory_host import two_ranks
from tests.helpers.task_host import Chance, Interruptions, Stuck


@pytest.mark.parametrize("name", shared_memory_scenarios.ALL)
def test_in_every_order_of_loads_and_stores_messages_arrive_as_they_were_sent(explored, name):
    plays = (shared_memory_scenarios.play(explored, name, Chance(seed), seed) for seed in range(20))
    assert sum(explorer.host.num_sleeps for explorer in plays), "no rank ever slept"


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.parametrize("name", shared_memory_scenarios.ALL)
def test_in_many_more_orders_messages_arrive_as_they_were_sent(explored, name):
    for seed in range(1000, 2000):
        shared_memory_scenarios.play(explored, name, Chance(seed), seed)


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_wherever_a_thread_is_interrupted_a_message_arrives(explored):
    for length in (1, 129, 400):
        try_every_interruption(explored, "one message", shared_memory_scenarios.LENGTHS.index(length))


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.parametrize("name", shared_memory_scenarios.ALL)
def test_wherever_a_thread_is_interrupted_all_messages_arrive(explored, name):
    try_every_interruption(explored, name, 1)


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("length", [1, 129])
def test_wherever_threads_are_interrupted_twice_a_message_arrives(explored, length, part):
    seed = shared_memory_scenarios.LENGTHS.index(length)
    without = Interruptions(())
    shared_memory_scenarios.play(explored, "one message", without, seed)
    pairs = itertools.combinations(range(1, without.num_points + 1), 2)
    for pair in itertools.islice(pairs, part, None, 40):
        shared_memory_scenarios.play(explored, "one message", Interruptions(pair), seed)


def try_every_interruption(explored, name, seed):
    """Plays a scenario once for each point at which one thread is stopped until the others sleep."""
    without = Interruptions(())
    shared_memory_scenarios.play(explored, name, without, seed)
    assert without.num_points > 50
    # Each access of the library is a point: of thousands every second or third is tried.
    for at in range(1, without.num_points + 1, 1 + without.num_points // 2000):
        shared_memory_scenarios.play(explored, name, Interruptions((at,)), seed)


def test_a_rank_that_nobody_wakes_is_found(explored):
    with two_ranks(explored, Chance(0)) as (explorer, backends):
        host = explorer.host
        host.add(0, lambda: backends[0].messages.irecv(1).wait(), 0)
        with pytest.raises(Stuck, match="rank 0, thread 0: a bell"):
            host.run()


def test_a_closed_doorbell_rings_nobody():
    """Its number may be another file's a moment later."""
    segment = Segment.create(2)
    doorbells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
    own = message_region.MessageRegion(segment, 0, doorbells)
    other = message_region.MessageRegion(Segment(os.dup(segment.fd), 2, 1), 1, doorbells)
    assert other.fall_asleep()
    own.wake(1)
    own.wake(1)
    assert os.eventfd_read(doorbells[1]) == 1, "one ring is enough"
    other.wake_up()
    own.wake(1)
    assert other.fall_asleep()
    own.doorbells.close()
    reused = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
    assert sorted(reused) == sorted(doorbells)
    own.wake(1)
    for fd in reused:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(fd)
        os.close(fd)
    for each in (segment, other._segment):
        each.close()
