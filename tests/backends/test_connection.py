"""One socket: frames are put together from whatever pieces arrive, and leave whole whatever room there is."""

import select
import socket
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.backends.delivery import Receive
from echelon.backends.formats import wire
from echelon.backends.formats.wire import Tag
from echelon.backends.matching import Mailbox
from echelon.backends.memory import bytes_of, dtype_code
from echelon.backends.tcp.connection import Connection, SocketSender
from echelon.backends.tcp.inbox import Inbox
from echelon.backends.work import Work
from echelon.errors import PeerFailed, ProtocolError


def connected(sock, *waking_bytes):
    """Returns the connection of a socket to rank 1, and notes the epoll events that it waits for."""
    asked = []
    connection = Connection(1, sock, 1 << 30, *waking_bytes, on_control=lambda *_: None, watch_for=asked.append)
    connection.asked = asked
    return connection


@pytest.fixture
def pair():
    """A connection to rank 1, and the socket of that rank."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        yield connected(ours), theirs


def message(tensor, step=0, note="", context=0, sequence=0):
    head = wire.Frame(
        wire.FrameKind.DATA,
        context,
        sequence,
        step,
        dtype_code(tensor.dtype),
        tuple(tensor.shape),
        note,
        tensor.numel() * tensor.dtype.itemsize,
    ).encode()
    return head + bytes(bytes_of(tensor))


class Placing(Inbox):
    """Inbox that has a buffer for every message, or for none that nobody asked for."""

    def __init__(self, mailbox, places=True):
        super().__init__(1, mailbox)
        self._places = places

    def open(self, head, *, comes_whole):
        delivery = super().open(head, comes_whole=comes_whole)
        if self._places:
            delivery.place()
        return delivery

    def give_buffer(self, delivery):
        pass


def take_in(connection, mailbox, places=True):
    assert connection.receiver.take_in(Placing(mailbox, places)) is False


def post(mailbox, step=0, out=None):
    work = Work(None, "receive")
    mailbox.post(Receive(work, 1, Tag(step=step), out, ""))
    return work


SIZES = st.lists(st.sampled_from([0, 1, 3, 100, 20_000]), min_size=1, max_size=8)


@given(SIZES, st.lists(st.integers(1, 3000), max_size=30), st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)))
def test_pieces_of_any_size_make_the_same_messages(sizes, cuts, posted_early, with_wrong_place):
    """Some are posted before they arrive, some after; those that do not fit fail alone."""
    tensors = [torch.arange(size, dtype=torch.int32) + number for number, size in enumerate(sizes)]
    data = b"".join(message(tensor, number) for number, tensor in enumerate(tensors))
    mailbox = Mailbox()
    works = {number: post_for(mailbox, number, with_wrong_place) for number in posted_early if number < len(sizes)}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = connected(ours)
        for cut in [*cuts, len(data)]:
            theirs.sendall(data[: min(cut, 60_000)])
            data = data[min(cut, 60_000) :]
            take_in(connection, mailbox)
        while data:
            theirs.sendall(data[:60_000])
            data = data[60_000:]
            take_in(connection, mailbox)
    for number, tensor in enumerate(tensors):
        work = works.get(number) or post_for(mailbox, number, with_wrong_place)
        if number in with_wrong_place:
            assert work.exception() is not None
        else:
            assert torch.equal(work.result(), tensor)


def post_for(mailbox, number, with_wrong_place):
    return post(mailbox, number, torch.zeros(7) if number in with_wrong_place else None)


def test_one_byte_at_a_time(pair):
    connection, theirs = pair
    mailbox = Mailbox()
    work = post(mailbox, 3)
    data = message(torch.tensor([[1.5, 2.5]]), 3)
    for position in range(len(data)):
        assert not work.is_completed()
        theirs.sendall(data[position : position + 1])
        take_in(connection, mailbox)
    assert work.result().tolist() == [[1.5, 2.5]]


def test_a_payload_goes_straight_where_it_belongs(pair):
    connection, theirs = pair
    mailbox = Mailbox()
    place = torch.zeros(10)
    work = post(mailbox, 0, place[2:6])
    theirs.sendall(message(torch.arange(4.0)))
    take_in(connection, mailbox)
    assert work.result().data_ptr() == place[2:].data_ptr()
    assert place.tolist() == [0, 0, 0, 1, 2, 3, 0, 0, 0, 0]


def test_a_message_without_a_place_holds_up_the_rest_until_it_has_one(pair):
    """Then its bytes go straight there, but for those that came with its head."""
    connection, theirs = pair
    mailbox = Mailbox()
    data = message(torch.arange(50_000.0), 1)
    theirs.sendall(data[:100_000])
    take_in(connection, mailbox, places=False)
    assert connection.receiver.is_paused
    assert connection.asked == [select.EPOLLRDHUP], "it is not read, but its end still shows"
    left = len(data) - connection.receiver._end
    take_in(connection, mailbox, places=False)
    assert left == len(data) - connection.receiver._end, "it reads on"
    place = torch.zeros(50_000)
    work = post(mailbox, 1, place)
    assert not connection.receiver.is_paused
    theirs.sendall(data[100_000:] + message(torch.tensor([5.0]), 2))
    take_in(connection, mailbox, places=False)
    assert work.result() is place
    assert torch.equal(place, torch.arange(50_000.0))
    assert connection.receiver.is_paused, "of the next message, which is there, too"
    assert post(mailbox, 2).is_completed() is False
    take_in(connection, mailbox, places=False)


def test_an_empty_message_is_held_as_well(pair):
    connection, theirs = pair
    mailbox = Mailbox()
    theirs.sendall(message(torch.zeros(0)))
    take_in(connection, mailbox, places=False)
    assert connection.receiver.is_paused
    work = post(mailbox)
    take_in(connection, mailbox, places=False)
    assert work.result().numel() == 0


def test_the_end_of_the_stream(pair):
    connection, theirs = pair
    theirs.close()
    with pytest.raises(OSError, match="its connection ended"):
        take_in(connection, Mailbox())


def test_garbage_is_a_protocol_error(pair):
    connection, theirs = pair
    theirs.sendall(b"\xff" * 40)
    with pytest.raises(ProtocolError, match="unknown kind 255"):
        take_in(connection, Mailbox())


def enqueue(connection, tensor, tag):
    work = Work(None, "send")
    head = message(tensor)[: wire.HEADER_BYTES + 8]
    connection.sender.send(head, tensor, tag, work)
    return work


def drain(connection, theirs):
    """Reads all that the connection has to write."""
    data = bytearray()
    while True:
        connection.sender.flush()
        try:
            data += theirs.recv(1 << 20)
        except BlockingIOError:
            return bytes(data)


def test_what_does_not_fit_waits_and_leaves_in_order(pair):
    connection, theirs = pair
    tensors = [torch.full((1 << 20,), float(number)) for number in range(3)]
    works = [enqueue(connection, tensor, Tag()) for tensor in tensors]
    assert not works[0].is_completed()
    assert connection.sender.queue
    assert connection.sender.owes
    assert connection.asked[-1] & select.EPOLLOUT
    assert drain(connection, theirs) == b"".join(message(tensor) for tensor in tensors)
    assert connection.asked[-1] == select.EPOLLIN
    assert all(work.is_completed() for work in works)
    assert not connection.sender.queue
    assert not connection.sender.owes


class FullSoon:
    """Socket of which the kernel takes 100 bytes of the first write."""

    def __init__(self, sock):
        self._sock = sock
        self.sendmsg = self._send_some

    def _send_some(self, parts):
        self.sendmsg = self._sock.sendmsg
        return self._sock.send(b"".join(parts)[:100])


def test_a_message_sent_at_once_may_change_though_the_kernel_took_only_a_part(pair):
    connection, theirs = pair
    connection.sender._sock = FullSoon(connection.sock)
    tensor = torch.ones(1000)
    head = message(tensor)[: wire.HEADER_BYTES + 8]
    assert connection.sender.put(head, tensor, Tag())
    assert connection.asked[-1] & select.EPOLLOUT, "nobody writes the rest"
    assert not connection.sender.put(head, tensor, Tag()), "it would overtake the rest"
    tensor.fill_(-1.0)
    assert drain(connection, theirs) == message(torch.ones(1000))
    assert connection.asked[-1] == select.EPOLLIN
    assert connection.sender.put(head, tensor, Tag())


def test_what_is_abandoned_is_not_sent_unless_it_has_begun(pair):
    connection, theirs = pair
    big = torch.ones(1 << 20)
    begun, waiting = (enqueue(connection, big, Tag(7, 1, step)) for step in range(2))
    point, other = enqueue(connection, big, Tag(7, 0)), enqueue(connection, big, Tag(8, 1))
    cause = PeerFailed(3, "gone")
    connection.sender.queue.abandon(7, cause)
    assert begun.exception() is waiting.exception() is cause
    assert not point.is_completed()
    assert connection.sender.owes
    assert drain(connection, theirs) == message(big) * 3, "the stream is out of step"
    assert (point.exception(), other.exception()) == (None, None)
    assert point.is_completed()


def test_nobody_is_owed_what_was_abandoned(pair):
    connection, theirs = pair
    enqueue(connection, torch.ones(1 << 20), Tag(7, 1))
    connection.sender.queue.abandon(7, PeerFailed(3, "gone"))
    connection.sender.send_word(wire.Frame(wire.FrameKind.CLOSE).encode())
    assert connection.sender.queue
    assert not connection.sender.owes
    assert drain(connection, theirs).endswith(wire.Frame(wire.FrameKind.CLOSE).encode())


class Narrow:
    """Socket with room for a number of bytes."""

    def __init__(self, room):
        self.room = room
        self.sent = b""

    def sendmsg(self, parts):
        if not self.room:
            raise BlockingIOError
        taken = b"".join(map(bytes, parts))[: self.room]
        self.sent += taken
        self.room -= len(taken)
        return len(taken)


def test_the_peer_is_owed_the_rest_of_a_message_whose_send_is_done():
    """`close` gave it up after five seconds, and said nothing."""
    tensor, end = torch.arange(100.0), wire.Frame(wire.FrameKind.CLOSE).encode()
    data = message(tensor)
    sock = Narrow(len(data) - 10)
    sender = SocketSender(sock, lambda _: None)
    assert sender.put(data[: -tensor.nbytes], tensor, Tag())
    tensor.zero_()
    assert sender.owes
    sender.send_word(end)
    assert sender.owes
    sock.room = 1 << 20
    sender.flush()
    assert sock.sent == data + end
    assert not sender.owes


def test_a_failure_ends_both_directions(pair):
    connection, theirs = pair
    mailbox = Mailbox()
    arriving = post(mailbox)
    leaving = enqueue(connection, torch.ones(1 << 20), Tag())
    theirs.sendall(message(torch.ones(100))[:-1])
    take_in(connection, mailbox)
    cause = PeerFailed(1, "gone")
    connection.fail(cause)
    assert arriving.exception() is leaving.exception() is cause
    assert connection.sock.fileno() == -1


@pytest.fixture
def tcp_pair():
    """A connection to rank 1 over TCP, and the socket of that rank."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        yield connected(ours), theirs


def is_readable(connection, seconds):
    """Whether who polls is to read, at once or within some seconds."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(seconds * 1e3))


def test_a_payload_is_read_in_parts_that_are_worth_a_call(tcp_pair):
    """To wake for each 64 KiB that a link brings took half of the processor time."""
    connection, peer = tcp_pair
    mailbox, tensor = Mailbox(), torch.arange(150_000, dtype=torch.int32)
    data, work = message(tensor), post(mailbox)
    word = wire.Frame(wire.FrameKind.CLOSE).encode()
    pump = partial(take_in, connection, mailbox)
    peer.sendall(data[:100_000])
    assert is_readable(connection, 20)
    pump()
    peer.sendall(data[100_000:200_000])
    assert not is_readable(connection, 0)
    peer.sendall(data[200_000:])
    while not work.is_completed():
        assert is_readable(connection, 20)
        pump()
    assert torch.equal(work.result(), tensor)
    peer.sendall(word[:1])
    assert is_readable(connection, 20)


def test_how_much_is_worth_a_call_is_for_who_makes_the_connection_to_say(tcp_pair):
    first, peer = tcp_pair
    connection = connected(first.sock, 40_000)
    mailbox, tensor = Mailbox(), torch.arange(150_000, dtype=torch.int32)
    data, work = message(tensor), post(mailbox)
    peer.sendall(data[:10_000])
    assert is_readable(connection, 20)
    take_in(connection, mailbox)
    peer.sendall(data[10_000:40_000])
    assert not is_readable(connection, 0.1)
    peer.sendall(data[40_000:60_000])
    assert is_readable(connection, 20)
    assert not work.is_completed()


def test_the_end_of_a_stream_in_the_middle_of_a_payload_is_noticed(tcp_pair):
    connection, peer = tcp_pair
    mailbox, tensor = Mailbox(), torch.arange(150_000, dtype=torch.int32)
    post(mailbox)
    peer.sendall(message(tensor)[:100_000])
    assert is_readable(connection, 20)
    take_in(connection, mailbox)
    assert not is_readable(connection, 0)
    peer.close()
    assert is_readable(connection, 20)
    with pytest.raises(OSError, match="its connection ended"):
        take_in(connection, mailbox)
