"""Messages that nobody has asked for yet: what becomes of them, and how much of them a rank keeps."""

import struct
import time

import pytest
import torch

from echelon.backends.formats.wire import Tag
from echelon.backends.tcp import reader
from echelon.errors import PeerFailed, Timeout
from tests.helpers.worlds import header, rank_0_and_a_bare_peer, start, tcp_world

SECONDS = 20.0
LARGE = 100_000
"""Bytes of a message that is left with the kernel until somebody asks for it."""


def message(value, num_bytes=4, **head):
    """Returns a message of equal floats as a peer sends it."""
    count = num_bytes // 4
    return header(payload=num_bytes, **head) + struct.pack("<Q", count) + struct.pack("<f", value) * count


@pytest.fixture
def allocated(monkeypatch):
    """The shapes of all tensors that are made for messages. A pause lasts for long, here."""
    shapes = []
    make = torch.empty

    def new_tensor(shape, dtype):
        shapes.append(shape)
        return make(shape, dtype=dtype)

    monkeypatch.setattr("echelon.backends.delivery.new_tensor", new_tensor)
    monkeypatch.setattr(reader, "_PAUSE_SECONDS", 60.0)
    return shapes


def test_a_receive_that_comes_a_little_late_has_its_message_in_place(allocated):
    place = torch.zeros(LARGE // 4)
    with rank_0_and_a_bare_peer() as (backend, peer):
        peer.sendall(message(1.0, step=1) + message(7.0, LARGE))
        assert backend.messages.recv(1, 1, timeout=SECONDS).item() == 1
        assert backend.messages.recv(1, out=place, timeout=SECONDS) is place
    assert place.eq(7.0).all()
    assert allocated == [(1,)], "the large message was stored elsewhere first"


@pytest.mark.parametrize("posted_first", [False, True])
def test_a_receive_gets_what_comes_after_a_message_that_nobody_asks_for(allocated, posted_first):
    with rank_0_and_a_bare_peer() as (backend, peer):
        early = backend.messages.irecv(1, 2) if posted_first else None
        peer.sendall(message(1.0, step=1) + message(7.0, LARGE) + message(2.0, step=2))
        assert backend.messages.recv(1, 1, timeout=SECONDS).item() == 1
        late = early or backend.messages.irecv(1, 2)
        assert late.wait(SECONDS).item() == 2
        assert backend.messages.recv(1, timeout=SECONDS).eq(7.0).all()


def test_a_receive_from_any_rank_gets_what_comes_after_a_message_that_nobody_asks_for(allocated):
    with rank_0_and_a_bare_peer() as (backend, peer):
        peer.sendall(message(1.0, step=1) + message(7.0, LARGE) + message(2.0, step=2))
        assert backend.messages.recv(1, 1, timeout=SECONDS).item() == 1
        assert backend.messages.irecv_any({1: 1}, 2).wait(SECONDS).tensor.item() == 2


def test_no_order_of_large_sends_and_receives_blocks():
    """Rank 1 waits for 2, 2 for 0, and 0 until 1 takes a message that it receives last."""
    large = torch.ones(1 << 22)
    with tcp_world(3) as world:

        def zero():
            world[0].messages.send(large, 1, timeout=SECONDS)
            world[0].messages.send(large * 2, 2, timeout=SECONDS)

        def one():
            late = world[1].messages.recv(2, timeout=SECONDS)
            return late, world[1].messages.recv(0, timeout=SECONDS)

        def two():
            got = world[2].messages.recv(0, timeout=SECONDS)
            world[2].messages.send(got + 1, 1, timeout=SECONDS)

        joins = [start(act) for act in (zero, one, two)]
        _, (late, early), _ = (join() for join in joins)
    assert late.eq(3).all()
    assert early.eq(1).all()


def flood(num_messages):
    return b"".join(message(float(number)) for number in range(num_messages))


def keep_waiting(backend, work):
    with pytest.raises(Timeout):
        work.wait(0.05)


def test_a_peer_that_sends_too_much_waits_until_it_is_received(caplog):
    limit = 10 << 10
    with rank_0_and_a_bare_peer(max_unclaimed_bytes=limit) as (backend, peer):
        last = backend.messages.irecv(1, 9)
        peer.sendall(flood(100) + message(-1.0, step=9))
        keep_waiting(backend, last)
        assert limit < backend.messages.mailbox.unclaimed.num_bytes[1] <= limit + 2 * 2700
        assert caplog.text.count("of its messages are unclaimed: receive its messages in the order") == 1
        for number in range(100):
            assert backend.messages.recv(1, timeout=SECONDS).item() == number
        assert last.wait(SECONDS).item() == -1
        assert backend.messages.mailbox.unclaimed.num_bytes[1] == 0


def test_it_goes_on_when_some_of_that_was_received():
    with rank_0_and_a_bare_peer(max_unclaimed_bytes=28 << 10) as (backend, peer):
        last = backend.messages.irecv(1, 9)
        peer.sendall(flood(13) + message(-1.0, step=9))
        keep_waiting(backend, last)
        assert [backend.messages.recv(1, timeout=SECONDS).item() for _ in range(4)] == [0, 1, 2, 3]
        assert last.wait(SECONDS).item() == -1


def test_one_message_may_be_larger_than_the_limit():
    with rank_0_and_a_bare_peer(max_unclaimed_bytes=1000) as (backend, peer):
        peer.sendall(message(7.0, LARGE) + message(1.0, step=1))
        assert backend.messages.recv(1, 1, timeout=SECONDS).item() == 1
        assert backend.messages.recv(1, timeout=SECONDS).eq(7.0).all()


def test_the_end_of_a_peer_is_noticed_beyond_what_it_sent_too_much():
    with rank_0_and_a_bare_peer(max_unclaimed_bytes=1000) as (backend, peer):
        work = backend.messages.irecv(1, 9)
        peer.sendall(flood(50))
        keep_waiting(backend, work)
        peer.close()
        with pytest.raises(PeerFailed, match="its connection ended"):
            work.wait(SECONDS)
        for number in range(50):
            assert backend.messages.recv(1, timeout=SECONDS).item() == number


def test_what_a_failed_group_leaves_unclaimed_is_read_over(allocated):
    with rank_0_and_a_bare_peer() as (backend, peer):
        peer.sendall(message(1.0, step=1) + message(7.0, LARGE, context=5, sequence=1) + message(2.0, step=2))
        assert backend.messages.recv(1, 1, timeout=SECONDS).item() == 1
        backend.control.revoke(5, [0, 1], PeerFailed(0, "gave up"))
        assert backend.messages.recv(1, 2, timeout=SECONDS).item() == 2
        assert backend.messages.irecv(1, Tag(5, 1)).exception() is not None
        assert backend.messages.mailbox.unclaimed.num_bytes[1] == 0
    assert (LARGE // 4,) not in allocated


def test_messages_that_a_failed_group_leaves_keep_no_others_out():
    """The limit was reached by them. The next message was read only when somebody asked for one more."""
    with rank_0_and_a_bare_peer(max_unclaimed_bytes=28 << 10) as (backend, peer):
        last = backend.messages.irecv(1, 9)
        collective = b"".join(message(1.0, context=5, sequence=1, step=step) for step in range(12))
        peer.sendall(collective + message(3.0) + message(4.0) + message(-1.0, step=9))
        keep_waiting(backend, last)
        backend.control.revoke(5, [0, 1], PeerFailed(0, "gave up"))
        assert last.wait(SECONDS).item() == -1
        assert [backend.messages.recv(1, timeout=SECONDS).item() for _ in range(2)] == [3, 4]


def test_who_reads_on_for_its_own_receive_wakes_those_that_wait(allocated, monkeypatch):
    """What they wait for may have come behind that message, and the one that polls for them does not see it."""
    with tcp_world(2, max_unclaimed_bytes=1) as (backend, other):
        late = backend.messages.irecv(1, 2)
        sends = [other.messages.isend(torch.ones(LARGE // 4), 0, 1) for _ in range(2)]
        sends.append(other.messages.isend(torch.ones(1), 0, 2))
        until = time.monotonic() + SECONDS
        while not backend.control._peers.reader._paused and time.monotonic() < until:
            backend.control.poll()
        woken = []
        monkeypatch.setattr(backend.messages.progress, "wake_waiters", lambda: woken.append(1))
        assert not late.is_completed()
        backend.messages.irecv(1, 1)
        assert woken
        assert late.wait(SECONDS).item() == 1
