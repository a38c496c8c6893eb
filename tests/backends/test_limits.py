"""What a rank keeps of a peer that knows the secret: each queue and table has a limit, and an end."""

import asyncio
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest
import torch

from echelon._native import PREFIX_BYTES
from echelon.backends.connect import acceptor
from echelon.backends.connect.acceptor import PeerAcceptor
from echelon.backends.connect.members import Job
from echelon.backends.connect.sockets import Sockets
from echelon.backends.formats import message_layout
from echelon.backends.formats.wire import Frame, FrameKind, Tag
from echelon.backends.matching import Mailbox
from echelon.backends.tcp import control_frames, process_watch, reader
from echelon.backends.tcp.backend import TcpBackend
from echelon.backends.tcp.inbox import MAX_UNCLAIMED_BYTES, Inbox
from echelon.backends.tcp.link import Link
from echelon.backends.tcp.reader import Reader
from echelon.collectives.calls.objects import _decode_all
from echelon.errors import ConnectError, PeerFailed, ProtocolError
from tests.helpers.worlds import SECRET, dial, free_address, hello, prove, rank_0_and_a_bare_peer, start

SECONDS = 20.0
QUESTION = Frame(FrameKind.QUESTION, 1, 1, 7).encode()

ANSWER = Frame(FrameKind.ANSWER, 1, 1, 0).encode()


def failed(context):
    return Frame(FrameKind.FAILED, context, step=1, note="it says so").encode()


def until(condition, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


# Questions


@pytest.mark.parametrize("drives", ["receive", "background"])
def test_thousands_of_questions_and_a_close_are_the_end_of_that_peer_alone(drives):
    """Each answer failed, so the rest was read, whose answers failed: the stack was as deep as there were frames."""
    with rank_0_and_a_bare_peer() as (backend, peer):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        with backend._progress.lock:  # nothing is read before all is there
            peer.sendall(QUESTION * 5_000)
            peer.close()
        if drives == "receive":
            with pytest.raises(PeerFailed, match="rank 1 failed"):
                backend.messages.recv(1, timeout=SECONDS)
        until(lambda: backend.control.failure(1, 0) is not None)
        assert backend._progress._background.is_alive()


def test_a_peer_that_asks_and_does_not_read_the_answers_is_dropped(monkeypatch):
    monkeypatch.setattr(control_frames, "MAX_UNSENT_WORDS", 100)
    with rank_0_and_a_bare_peer() as (backend, peer):
        work = backend.messages.irecv(1)
        asking = start(keep_sending, peer, QUESTION * 1000)
        with pytest.raises(PeerFailed, match="rank 1 sends queries, but has not read the last 100"):
            work.wait(SECONDS)
        asking()


def keep_sending(peer, data):
    deadline = time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline:
            peer.sendall(data)
    except OSError:
        return
    raise AssertionError("a peer could send as much as it liked")


def test_who_reads_the_answers_may_ask_as_often_as_it_likes(monkeypatch):
    monkeypatch.setattr(control_frames, "MAX_UNSENT_WORDS", 100)
    with rank_0_and_a_bare_peer() as (backend, peer):
        work = backend.messages.irecv(1)
        peer.settimeout(SECONDS)
        for _ in range(20):
            peer.sendall(QUESTION * 50)
            came = 0
            while came < 50 * len(QUESTION):  # an answer is at least as long
                came += len(peer.recv(1 << 16))
        assert not work.is_completed()


# Groups that are ended


def test_a_peer_that_ends_groups_without_end_is_dropped_and_its_revocations_stay(monkeypatch):
    monkeypatch.setattr(control_frames, "MAX_REVOKED_CONTEXTS", 100)
    with rank_0_and_a_bare_peer() as (backend, peer):
        work = backend.messages.irecv(1)
        mismatch = Frame(FrameKind.MISMATCH, 1050, note="they disagree").encode()
        peer.sendall(b"".join(failed(1000 + number) for number in range(50)) * 3 + mismatch * 3)
        peer.sendall(b"".join(failed(2000 + number) for number in range(49)))
        until(lambda: backend.control._mailbox.failures.revoked(2048) is not None)
        assert not work.is_completed(), "100 groups, some of them told more than once, are within the limit"
        peer.sendall(failed(3000))
        with pytest.raises(PeerFailed, match="rank 1 has revoked more than 100 groups"):
            work.wait(SECONDS)
        assert backend.control._mailbox.failures.revoked(1000) is not None
        assert backend.control._mailbox.failures.revoked(2048) is not None
        assert backend.control._mailbox.failures.revoked(3000) is None


# Messages that nobody asks for


def resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


SHAPES = {
    "no bytes": ((0,), ""),
    "one byte": ((1,), ""),
    "many dimensions": ((0, *range(2, 5), *[1] * 60), ""),
    "long notes": ((0,), "x" * 1000),
    "wide notes": ((0,), "x" * 1000 + "\U0001f600"),
}


def keep_messages(name):
    """Prints how much memory 20,000 messages took, and how much they were counted with."""
    shape, note = SHAPES[name]
    begin, box = 0, Mailbox()
    for number in range(21_000):
        if number == 1_000:  # what torch takes once is taken
            begin = resident_bytes(), box.unclaimed.num_bytes[1]
        sizes = tuple(int(str(size)) for size in shape)
        delivery = box.arrive(
            1, Tag(number, 1 << 40 | number, number), sizes, torch.uint8, note and note[1:] + str(number % 10)
        )
        delivery.place()
        delivery.finish()
    print(resident_bytes() - begin[0], box.unclaimed.num_bytes[1] - begin[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_unclaimed_messages_take_no_more_memory_than_they_are_counted_with(name):
    """A million messages without a byte took twice the limit, ones with long notes seven times."""
    code = f"from tests.backends.test_limits import keep_messages; keep_messages({name!r})"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    taken, counted = map(int, printed.stdout.split())
    assert taken < 1.15 * counted


def test_the_note_and_shape_of_a_message_count():
    sizes = []
    for shape, note in SHAPES.values():
        box = Mailbox()
        box.arrive(1, Tag(0, 0, 1), shape, torch.uint8, note)
        sizes.append(box.unclaimed.num_bytes[1])
    plain, one, dims, long, wide = sizes
    assert plain > 2000
    assert one == plain + 1
    assert dims > plain + 63 * 40
    assert long == plain + 1000
    assert wide == plain + 4 * 1001


def test_a_hundred_thousand_small_messages_that_nobody_asks_for_are_kept():
    """Programs that send that many before the other side looks went on, and go on."""
    box = Mailbox()
    inbox = Inbox(1, box)
    delivery = box.arrive(1, Tag(0, 0, 1), (2,), torch.float32, "a note of a hundred characters".ljust(100))
    assert 300_000 * delivery.memory_bytes < MAX_UNCLAIMED_BYTES
    assert not inbox.is_full()


# The last words of a peer


class _Endless:
    """Receiver of a link whose writer never stops."""

    delivery = None
    num_taken = 0

    def take_in(self, inbox):
        self.num_taken += 1
        assert self.num_taken < 1 << 20
        return True


def test_a_peer_that_writes_on_after_its_goodbye_is_cut_off():
    failures = []
    box = Mailbox()
    links = Reader(None, None, lambda rank, error: failures.append((rank, str(error))))
    link = Link(1, None, _Endless())
    links.links[link] = Inbox(1, box, 1)
    links.finish(link)
    ((rank, error),) = failures
    assert rank == 1
    assert "messages came after its CLOSE frame" in error


def test_a_full_ring_is_read_after_its_writers_goodbye():
    smallest = PREFIX_BYTES + message_layout.HEADER_BYTES
    assert message_layout.SIZES.ring_bytes // smallest < reader._MOST_AT_END


def test_a_dead_process_whose_socket_goes_on_sending_has_an_end(monkeypatch):
    """A child of it may hold the socket. It was read for as long as something came."""
    for module in (process_watch, reader):
        monkeypatch.setattr(module, "MAX_LAST_WORDS_SECONDS", 0.1)
    ended = subprocess.Popen(["true"])
    ended.wait()
    with rank_0_and_a_bare_peer() as (backend, peer):
        member = backend.members[1]
        sending = start(keep_sending, peer, ANSWER * 1000)
        begun = time.monotonic()
        while backend.control.failure(1, 0) is None:
            with backend._progress.lock:
                backend._processes.on_end(member)
            assert time.monotonic() - begun < SECONDS
        sending()


# The hall


async def _hold_insiders(count):
    """Returns how many of so many connections that have proved themselves, and say nothing more, are held."""
    loop = asyncio.get_running_loop()
    with Sockets() as sockets:
        listener = await sockets.listen("127.0.0.1", 0)
        host, port = listener.getsockname()[:2]
        async with PeerAcceptor(Job(0, 2, SECRET), sockets, listener) as here:
            insiders = []
            for _ in range(count):
                insiders.append(await loop.run_in_executor(None, _prove_oneself, f"{host}:{port}"))
                await asyncio.sleep(0.01)
            held = len(here._unnamed)
            for insider in insiders:
                insider.close()
            return held


def _prove_oneself(address):
    connection = dial(address)
    prove(connection)
    return connection


def test_of_those_that_prove_themselves_and_say_nothing_the_newest_are_held(monkeypatch):
    monkeypatch.setattr(acceptor, "_MAX_STRANGERS", 3)
    assert asyncio.run(_hold_insiders(12)) == 5


def test_a_greeting_has_a_limit_of_its_own():
    """A thousand connections of a megabyte each were a gigabyte."""
    with free_address() as address:
        joining = start(lambda: wait_in_vain(address))
        with dial(address) as connection:
            prove(connection)
            connection.sendall((1 << 15).to_bytes(4, "little"))
            connection.settimeout(SECONDS)
            assert connection.recv(1) == b""
        joining()


def wait_in_vain(address):
    with pytest.raises(ConnectError):
        TcpBackend(0, 2, address, secret=SECRET, connect_timeout=0.5)


def test_what_a_greeting_says_is_repeated_in_part():
    objection = Job(0, 2, SECRET, "mine").objection(hello(run_id="x" * 10_000))
    assert "xxxx" in objection
    assert len(objection) < 500


# What is nested


@pytest.mark.parametrize("text", [b"[" * 100_000, b"{", b"1" * 5000, b"\xff"])
def test_an_object_that_is_no_json_is_a_protocol_error(text):
    """A hundred thousand brackets were a RecursionError."""
    data = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    with pytest.raises(ProtocolError, match=f"an object of {len(text)} bytes that is not JSON"):
        _decode_all(data)


def test_peers_that_free_each_others_messages_are_read_one_after_the_other():
    """Each of them was read from within the one before."""
    depths, order = [], []
    everybody = Reader(None, None, None)
    links = [Link(rank, None, None) for rank in range(5_000)]
    everybody.links = dict.fromkeys(links)

    def read(link):
        depths.append(len(depths) - len(order))
        if link.rank + 1 < len(links):
            everybody.read(links[link.rank + 1])
        order.append(link.rank)

    everybody._read_some = read
    everybody.read(links[0])
    assert order == list(range(5_000))
    assert set(depths) == {0}
