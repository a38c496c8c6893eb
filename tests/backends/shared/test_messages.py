"""Messages between processes that share memory: large ones, many, those of ranks that leave or die."""

import gc
import os
import random
import struct
import threading
import time

import pytest
import torch

import echelon
from echelon.backends.formats import message_layout
from echelon.backends.formats.wire import Tag
from echelon.backends.shared.messages import receiver
from echelon.backends.tcp.backend import TcpBackend
from tests.helpers.forked_ranks import run_forked
from tests.helpers.shared_memory_checks import shared_kib, values

MIB = 1 << 20
USE_LINKS = TcpBackend.use_links
LENGTHS = (0, 1, 4096, 4097, 70_000, MIB, 4 * MIB + 3, 6 * MIB)
"""Numbers of float32: within a record, within a piece, in some, and (24 MiB) round in a circle."""


def pass_to_and_fro(group):
    """Each message goes there and back, received in this way and that, while as much goes the other way."""
    peer = 1 - group.rank
    for length in LENGTHS:
        mine = values(group.rank, length)
        for out in (None, torch.empty(length)):
            sent = group.isend(mine, peer)
            came = group.recv(peer, out=out)
            assert torch.equal(came, values(peer, length)), f"{length}, out={out is not None}"
            sent.wait()
            assert torch.equal(group.sendrecv(came, peer, peer), mine), f"{length} back"
    return group.backend.name


def test_messages_of_every_size_arrive_both_ways_at_once():
    assert set(run_forked(pass_to_and_fro, 2, backend="shm", timeout=40.0).values()) == {"shm"}


def send_many(group):
    """Sends more than rings and arenas hold before anybody receives, and in another order than it is received in."""
    peer = 1 - group.rank
    works = [group.isend(torch.full((length,), float(number)), peer, tag=number % 3) for number, length in sizes()]
    for tag in (2, 0, 1):
        for number, length in sizes():
            if number % 3 == tag:
                came = group.recv(peer, tag)
                assert came.shape == (length,)
                assert came.eq(number).all()
    for work in works:
        work.wait()
    return True


def sizes():
    chance = random.Random(5)
    return [(number, chance.choice((1, 3000, 10_000, 300_000))) for number in range(600)]


def test_messages_are_kept_whatever_is_received_first():
    assert list(run_forked(send_many, 2, backend="shm", timeout=60.0).values()) == [True] * 2


def receive_at_once(group):
    """Small messages need no Works: to send, while there is room, and to receive, if they lie in memory."""
    backend, tag, small = group.backend, Tag(group.context, 0, 5), torch.arange(2000.0)
    if group.rank == 0:
        send = backend.messages.prepare_send(1, tag, small.shape, small.dtype)
        large = torch.zeros(100_000)
        went = [send.at_once(small) for _ in range(50)]
        went.append(backend.messages.prepare_send(1, tag, large.shape, large.dtype).at_once(large))
        group.barrier()
        for _ in range(20):
            group.recv(1, 6)
            went.append(send.at_once(small))
        return went.count(True), went.index(False)
    group.barrier()
    receive = backend.messages.prepare_receive(0, tag)
    found = [receive.at_once() for _ in range(2)]
    for _ in range(48 + found.count(None)):
        assert torch.equal(group.recv(0, 5), small)
    for _ in range(20):
        group.send(torch.ones(1), 0, 6)
        place = torch.zeros(2000)
        receiver, mailbox = backend.messages.links[0].receiver, backend.messages.mailbox
        while not receiver.has_written() and mailbox.is_free(0, tag):
            time.sleep(0.001)
        found.append(receive.at_once(place))
        if found[-1] is None:  # the thread in the background has looked just then
            group.recv(0, 5, out=place)
        assert torch.equal(place, small)
    return len(found) - found.count(None)


def test_small_messages_need_no_work():
    sent, received = run_forked(receive_at_once, 2, backend="shm").values()
    assert sent == [70, 50]
    assert received > 0


def receive_in_turn(group):
    """Rank 1 has one message taken in and not received, then a receive posted, when another message is written."""
    backend, tag = group.backend, Tag(group.context, 0, 5)
    if group.rank == 0:
        group.send(torch.tensor([0]), 1, 5)
        group.send(torch.tensor([1]), 1, 5)
        for number in (2, 3):
            group.recv(1, 6)
            group.send(torch.tensor([number]), 1, 5)
        return None
    receiver, found = backend.messages.links[0].receiver, []
    time.sleep(0.05)
    found.append(group.recv(0, 5).item())
    group.send(torch.ones(1), 0, 6)
    wait_until(receiver.has_written)
    early = backend.messages.prepare_receive(0, tag).at_once()  # the one taken in, if the thread in the background did
    found += [(early.tensor if early is not None else group.recv(0, 5)).item(), group.recv(0, 5).item()]
    with backend.messages.will_wait():  # the thread in the background does not look
        work = group.irecv(0, 5)
        group.send(torch.ones(1), 0, 6)
        wait_until(lambda: receiver.has_written() or work.is_completed())
        late = backend.messages.prepare_receive(0, tag).at_once()
        return [*found, work.wait().item(), late is None]


def wait_until(condition):
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_nothing_is_received_at_once_before_what_came_or_was_asked_for_earlier():
    assert run_forked(receive_in_turn, 2, backend="shm")[1] == [0, 1, 2, 3, True]


def send_and_leave(group):
    if group.rank == 0:
        for length in (1, 100_000, 6 * MIB):
            group.isend(torch.full((length,), 7.0), 1, tag=min(length, 2))
        return "left"
    with pytest.raises(echelon.PeerFailed, match="closed its group"):
        group.recv(0, tag=99)
    first = group.recv(0, tag=1)
    second = group.recv(0, tag=2, out=torch.empty(100_000))
    third = group.recv(0, tag=2)
    return [first.sum().item(), second.sum().item(), third.sum().item()]


def test_what_was_sent_before_a_rank_left_can_be_received():
    assert run_forked(send_and_leave, 2, backend="shm")[1] == [7.0, 7.0 * 100_000, 7.0 * 6 * MIB]


def send_more_than_is_kept_and_leave(group):
    """Rank 1 keeps less than it is sent, until it hears that no more will come."""
    count = 20
    if group.rank == 0:
        group.recv(1)
        for number in range(count):
            group.send(torch.full((1000,), float(number)), 1)
        return None
    group.backend.control._peers.inboxes[0].max_unclaimed_bytes = 5000
    group.send(torch.ones(1), 0)
    with pytest.raises(echelon.PeerFailed, match="closed its group"):
        group.recv(0, tag=99)
    while group.backend.control._peers.connections:
        group.backend.control.poll()
    return [group.recv(0)[0].item() for _ in range(count)]


def test_what_was_not_taken_in_before_a_rank_left_can_be_received():
    assert run_forked(send_more_than_is_kept_and_leave, 2, backend="shm")[1] == list(range(20))


def close_with_something_unsent(group):
    """Rank 1 takes in nothing after the first message, so rank 0 cannot write all of one that goes in a circle."""
    group.backend.control._peers.inboxes[1 - group.rank].max_unclaimed_bytes = 0
    group.barrier()
    if group.rank == 0:
        group.send(torch.ones(1), 1)
        group.isend(torch.ones(6 * MIB), 1)
        with pytest.raises(echelon.Timeout, match="did not receive all messages"):
            group.backend.close(0.05)
    else:
        with pytest.raises(echelon.PeerFailed):
            group.recv(0, tag=99)
    return group.backend.segment.fd, group.backend._doorbells._fds


def test_closing_frees_everything_even_if_not_all_was_sent():
    assert run_forked(close_with_something_unsent, 2, backend="shm")[0] == [-1, []]


def use_links_late(backend, links, memory, doorbell):
    """As a rank does that gets a core only when the other one has sent all it has, and left."""
    if backend.rank == 1:
        with backend._progress.lock:
            while backend.messages.mailbox.failures.of(0, Tag()) is None:
                backend._progress.step(1.0)
    USE_LINKS(backend, links, memory, doorbell)


def test_what_was_sent_before_this_rank_looked_at_memory_can_be_received(monkeypatch):
    monkeypatch.setattr(TcpBackend, "use_links", use_links_late)
    assert run_forked(send_and_leave_at_once, 2, backend="shm")[1] == [7.0, 700_000.0]


def send_and_leave_at_once(group):
    if group.rank == 0:
        for length in (1, 100_000):
            group.isend(torch.full((length,), 7.0), 1)
        return "left"
    received = [group.recv(0).sum().item() for _ in range(2)]
    with pytest.raises(echelon.PeerFailed, match="closed its group"):
        group.recv(0)
    return received


def keep_some(group):
    """Returns how much shared memory this rank has mapped while it keeps received tensors, in KiB."""
    if group.rank == 0:
        for number in range(4):
            group.send(torch.full((2 * MIB,), float(number)), 1)
        group.recv(1)
        return None
    kept = [group.recv(0) for _ in range(4)]
    assert [tensor[0].item() for tensor in kept] == [0.0, 1.0, 2.0, 3.0]
    for tensor in kept:
        tensor += 1
    mapped = shared_kib()
    part = kept[3][:10]
    del tensor, kept
    gc.collect()
    assert part.eq(4.0).all()
    group.send(torch.ones(1), 0)
    return mapped


def test_a_received_tensor_is_the_memory_that_it_was_written_to():
    assert run_forked(keep_some, 2, backend="shm")[1] >= 4 * 8 * 1024


LENGTHS_TO_TAKE = (100, 65536, 65537, MIB, 4 * MIB, 4 * MIB + 1)
"""Numbers of float32: within a record, in a part as a whole, round in a circle."""


def compare_with_mapped(group):
    """Returns, of each message that came, whether the backend says that it brings memory, and whether it did."""
    if group.rank == 0:
        for length in LENGTHS_TO_TAKE:
            group.send(torch.full((length,), 7.0), 1)
        return None
    found = []
    for _ in LENGTHS_TO_TAKE:
        came = group.recv(0)
        assert came.eq(7.0).all()
        found.append((group.backend.messages.brings_memory(0, came.nbytes), is_mapped(came.data_ptr())))
    return found


def is_mapped(address):
    """Says whether shared memory is mapped there."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            if begin <= address < end:
                return "memfd:echelon" in line
    return False


def test_a_backend_says_which_messages_bring_their_memory():
    told = run_forked(compare_with_mapped, 2, backend="shm")[1]
    assert told == [[said, said] for said in (False, False, True, True, True, False)]


def send_in_turns(group, times, length):
    """Rank 1 keeps nothing, so the same memory serves all messages; returns how much of it there is at the end."""
    peer = 1 - group.rank
    for number in range(times):
        if group.rank == 0:
            group.send(torch.full((length,), float(number)), peer)
        else:
            assert group.recv(peer).eq(number).all()
        group.barrier()
    return shared_kib()


def test_memory_of_messages_is_used_again():
    once = run_forked(send_in_turns, 2, 2, MIB, backend="shm")
    often = run_forked(send_in_turns, 2, 40, MIB, backend="shm")
    assert all(often[rank] <= once[rank] + 1024 for rank in (0, 1)), (once, often)


def receive_more_than_is_lent(group):
    if group.rank == 0:
        for number in range(6):
            group.send(torch.full((MIB,), float(number)), 1)
        return group.recv(1).item()
    kept = [group.recv(0) for _ in range(6)]
    assert [tensor[-1].item() for tensor in kept] == list(range(6))
    group.send(torch.ones(1), 0)
    return [tensor.sum().item() / MIB for tensor in kept]


def test_beyond_a_limit_received_tensors_are_copies(monkeypatch):
    monkeypatch.setattr(receiver, "_MAX_LENT_BYTES", 9 * MIB)
    assert run_forked(receive_more_than_is_lent, 2, backend="shm") == {0: 1.0, 1: [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]}


def drop_in_a_child(group):
    """A forked child lets go of a received tensor; the parent's is as it was when the next message has come."""
    if group.rank == 0:
        group.send(torch.full((MIB,), 1.0), 1)
        group.recv(1)
        group.send(torch.full((MIB,), 2.0), 1)
        return 0.0
    tensor = group.recv(0)
    pid = os.fork()
    if pid == 0:
        del tensor
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    group.send(torch.ones(1), 0)
    assert group.recv(0).eq(2.0).all()
    return tensor.sum().item()


def test_a_forked_child_does_not_free_what_its_parent_has():
    assert run_forked(drop_in_a_child, 2, backend="shm") == {0: 0.0, 1: float(MIB)}


def write_nonsense(group):
    if group.rank == 0:
        post = group.backend.messages.links[1 - group.rank].sender._post
        ring = post.ring(0, 1)
        post.region.memory[ring : ring + 8] = struct.pack("<II", 640, 600)
        post.words[post.news(0, 1) + message_layout.RECORDS] = 128
        post.wake(1)
        with pytest.raises(echelon.PeerFailed):
            group.recv(1)
        return None
    with pytest.raises(echelon.PeerFailed, match="the peer does not speak this protocol"):
        group.recv(0)
    group.abort("it was sent nonsense")
    return True


def test_nonsense_is_refused_before_it_is_read():
    assert run_forked(write_nonsense, 2, backend="shm")[1] is True


def say_that_more_was_read_than_is_written(group):
    """What the reader of a message says of it is nonsense: the sender takes it for dead, and goes on."""
    if group.rank == 1:
        post = group.backend.messages.links[1 - group.rank].sender._post
        post.words[post.answers(0, 1) + message_layout.DRAINED] = 1000
        group.send(torch.ones(1), 0)
        with pytest.raises(echelon.PeerFailed):
            group.recv(0, tag=99)
        return None
    group.recv(1)
    with pytest.raises(echelon.PeerFailed, match="the peer does not speak this protocol"):
        group.isend(torch.ones(MIB), 1).wait()
    group.abort("it was told nonsense")
    return True


def test_nonsense_about_what_was_read_is_refused():
    assert run_forked(say_that_more_was_read_than_is_written, 2, backend="shm")[0] is True


def wait_idle(group):
    """Returns what part of a core rank 1 uses while it waits for a message that comes a second later."""
    group.barrier()
    if group.rank == 0:
        threading.Event().wait(1.0)
        group.send(torch.ones(1), 1)
        return 0.0
    begin, used = time.monotonic(), time.process_time()
    group.recv(0)
    return (time.process_time() - used) / (time.monotonic() - begin)


def test_a_rank_that_waits_uses_no_core():
    # On a busy host a sleep costs more: one quiet attempt of three shows that the rank does not poll.
    assert any(run_forked(wait_idle, 2, backend="shm")[1] < 0.01 for _ in range(3))
