"""Programs on processes that wait for each other's messages are told within seconds, and others are left alone."""

import asyncio
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import echelon

BACKENDS = pytest.mark.parametrize("backend", ["tcp", "shm"])
HERE = r"[^ ]*test_message_cycles\.py:\d+"
ERRORS = (echelon.DeadlockError, echelon.CollectiveMismatch, echelon.PeerFailed)


def receive_in_a_ring(group, unread):
    """Each rank waits for the next one, rank 1 by a Work. With `unread` each has a message of another tag already."""
    following = (group.rank + 1) % group.world_size
    if unread:
        group.send(torch.ones(5), (group.rank - 1) % group.world_size, tag=3)
    idle = ThreadPoolExecutor(1)  # it can get work from the waiting thread alone
    idle.submit(int).result()
    with pytest.raises(ERRORS) as caught:
        group.irecv(following).wait() if group.rank == 1 else group.recv(following)
    idle.shutdown()
    if unread:
        group.recv(following, tag=3)
    return str(caught.value)


@pytest.mark.parametrize(("world_size", "unread"), [(2, True), (3, False)])
@BACKENDS
def test_receives_in_a_ring(pool, backend, world_size, unread):
    messages = pool.run(receive_in_a_ring, world_size, unread, backend=backend)
    begin = r"they wait for each other's messages, (rank \d -> )+rank \d: rank \d in receive from rank \d, tag 0"
    assert any(re.search(f"{begin} of group 'world' at {HERE}; rank ", message) for message in messages), messages
    assert any("; rank 0 in" in message or ": rank 0 in" in message for message in messages), messages


def receive_beside_a_collective(group):
    """Rank 0 waits for rank 1, which waits for rank 2, while rank 2 is in a collective."""
    with pytest.raises(ERRORS) as caught:
        group.all_reduce(torch.ones(3)) if group.rank == 2 else group.recv(group.rank + 1)
    return str(caught.value)


@BACKENDS
def test_a_collective_that_waits_for_ranks_in_receives(pool, backend):
    messages = pool.run(receive_beside_a_collective, 3, backend=backend)
    wanted = (
        rf"#1 of group 'world' at {HERE} on rank 2 waits for rank (0|1), which waits for a message instead, and so for "
        rf"this rank: .*rank 1 in receive from rank 2, tag 0 of group 'world' at {HERE}"
    )
    assert any(re.search(wanted, message) for message in messages), messages


def waits_of_both_kinds(group):
    """Two pipelines of two stages: pairs that average gradients wait for pairs that exchange activations."""
    first, second = group.subgroup([0, 1]), group.subgroup([2, 3])
    pair = first if group.rank == 0 else second
    with pytest.raises(ERRORS) as caught:
        group.recv({1: 3, 2: 0}[group.rank]) if group.rank in (1, 2) else pair.all_reduce(torch.ones(3))
    return str(caught.value)


@BACKENDS
def test_a_circle_of_collectives_and_messages(pool, backend):
    messages = pool.run(waits_of_both_kinds, 4, backend=backend)
    receive = rf"receive from rank \d, tag 0 of group 'world' at {HERE}"
    reduce = rf"all_reduce\(sum\) of float32\[3\], #1 of group 'world/\d' at {HERE}"
    wanted = (
        rf"{reduce} on rank (0|3) waits for rank (1|2), which waits in {receive}, which waits for rank (1|2) in "
        rf"{reduce}, which waits in {receive}: put collectives and messages in one order that all ranks follow"
    )
    assert any(re.search(wanted, message) for message in messages), messages


def received_after_a_collective_of_others(group):
    """Rank 1 waits for a message that rank 2 sends after a collective, for which rank 3 comes late."""
    pair = [group.subgroup([0, 1]), group.subgroup([2, 3])]
    if group.rank == 0:
        pair[0].all_reduce(torch.ones(3))
    elif group.rank == 1:
        group.recv(2)
        pair[0].all_reduce(torch.ones(3))
    elif group.rank == 2:
        pair[1].all_reduce(torch.ones(3))
        group.send(torch.ones(3), 1)
    else:
        time.sleep(3.5)
        pair[1].all_reduce(torch.ones(3))
    return True


@BACKENDS
def test_ranks_that_wait_for_a_late_one_go_on(pool, backend):
    assert all(pool.run(received_after_a_collective_of_others, 4, backend=backend))


def send_in_a_thread(group):
    """Each rank waits for the other, and a thread of rank 0 sends after seconds."""

    def send_late():
        time.sleep(3.5)
        group.send(torch.tensor(5), 1)

    if group.rank == 0:
        thread = threading.Thread(target=send_late)
        thread.start()
        came = group.recv(1)
        thread.join()
        return came.item()
    came = group.recv(0)
    group.send(came, 0)
    return came.item()


def send_by_a_timer(group):
    """Each rank waits for the other, and a timer of rank 0 sends after seconds."""
    if group.rank == 0:
        threading.Timer(3.5, group.send, (torch.tensor(5), 1)).start()
        return group.recv(1).item()
    came = group.recv(0)
    group.send(came, 0)
    return came.item()


def send_by_an_event_loop(group):
    """Each rank waits for the other, and an event loop in a thread of rank 0 sends after seconds."""
    if group.rank == 0:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        loop.call_soon_threadsafe(loop.call_later, 3.5, group.send, torch.tensor(5), 1)
        came = group.recv(1).item()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        return came
    came = group.recv(0)
    group.send(came, 0)
    return came.item()


def send_after_a_while(group):
    """Rank 0 computes, rank 1 waits for it, rank 2 for rank 1, and in the end rank 0 for rank 2."""
    if group.rank == 0:
        time.sleep(3.5)
        group.send(torch.tensor(5), 1)
        return group.recv(2).item()
    came = group.recv(group.rank - 1)
    group.send(came, (group.rank + 1) % 3)
    return came.item()


def give_up_after_a_while(group):
    """Each rank waits for the other with a timeout of its own, and goes on after it."""
    with pytest.raises(echelon.Timeout):
        group.recv(1 - group.rank, timeout=2.5)
    return group.all_reduce(torch.ones(1)).item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "world_size", "result"),
    [
        (send_in_a_thread, 2, 5),
        (send_by_a_timer, 2, 5),
        (send_by_an_event_loop, 2, 5),
        (send_after_a_while, 3, 5),
        (give_up_after_a_while, 2, 2.0),
    ],
)
@BACKENDS
def test_programs_that_go_on_are_left_alone(pool, backend, program, world_size, result):
    assert pool.run(program, world_size, backend=backend) == [result] * world_size
