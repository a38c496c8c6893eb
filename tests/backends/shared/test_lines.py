"""Messages in shared memory, with the threads of two ranks in every order that chance finds, or one after the other.

The ends are the real ones, with rings and parts so small that everything happens: rings are full, their end is passed
over, messages go round in circles, parts are used again, ranks sleep. What is missing is the processor's own order of
loads and stores, of which the documents say what is relied on.
"""

import itertools
import os
import threading

import pytest

from echelon.backends.shared.memory.segment import Segment
from echelon.backends.shared.messages import message_region
from tests.helpers import shared_memory_scenarios
from tests.helpers.shared_memory_host import Chance, Interruptions, Stuck, two_ranks


@pytest.mark.parametrize("name", shared_memory_scenarios.ALL)
def test_in_every_order_of_loads_and_stores_messages_arrive_as_they_were_sent(name):
    assert sum(shared_memory_scenarios.play(name, Chance(seed), seed) for seed in range(40)), "no rank ever slept"


@pytest.mark.slow
@pytest.mark.parametrize("name", shared_memory_scenarios.ALL)
def test_in_many_more_orders_messages_arrive_as_they_were_sent(name):
    for seed in range(1000, 3000):
        shared_memory_scenarios.play(name, Chance(seed), seed)


@pytest.mark.slow
def test_wherever_a_thread_is_interrupted_a_message_arrives():
    for length in (1, 129, 400):
        try_every_interruption("one message", shared_memory_scenarios.LENGTHS.index(length))


@pytest.mark.slow
@pytest.mark.parametrize("name", shared_memory_scenarios.ALL)
def test_wherever_a_thread_is_interrupted_all_messages_arrive(name):
    try_every_interruption(name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("length", [1, 129])
def test_wherever_threads_are_interrupted_twice_a_message_arrives(length, part):
    seed = shared_memory_scenarios.LENGTHS.index(length)
    without = Interruptions(())
    shared_memory_scenarios.play("one message", without, seed)
    pairs = itertools.combinations(range(1, without.num_points + 1), 2)
    for pair in itertools.islice(pairs, part, None, 8):
        shared_memory_scenarios.play("one message", Interruptions(pair), seed)


def try_every_interruption(name, seed):
    """Plays a scenario once for each point at which one thread is stopped until the others sleep."""
    without = Interruptions(())
    shared_memory_scenarios.play(name, without, seed)
    assert without.num_points > 50
    for at in range(1, without.num_points + 1):
        shared_memory_scenarios.play(name, Interruptions((at,)), seed)


def test_a_rank_that_nobody_wakes_is_found():
    with two_ranks(Chance(0)) as (host, backends):
        host.add(0, lambda: backends[0].messages.irecv(1).wait(), 0)
        with pytest.raises(Stuck, match="rank 0, thread 0: a bell"):
            host.run()


def test_no_doorbell_is_closed_while_it_rings(monkeypatch):
    """Its number may be another file's a moment later."""
    segment = Segment.create(2)
    doorbells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
    own = message_region.MessageRegion(segment, 0, doorbells)
    other = message_region.MessageRegion(Segment(os.dup(segment.fd), 2, 1), 1, doorbells)
    assert other.fall_asleep()
    closing = threading.Thread(target=own.doorbells.close)
    rung = []

    def ring(fd, value):
        closing.start()
        closing.join(0.05)
        os.fstat(fd)
        rung.append((closing.is_alive(), value))

    monkeypatch.setattr(os, "eventfd_write", ring)
    own.wake(1)
    closing.join()
    own.wake(1)
    assert rung == [(True, 1)]
    for each in (segment, other._segment):
        each.close()
