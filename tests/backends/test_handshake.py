"""What a rank does with strangers, and with what only looks like one of its own."""

import asyncio
import contextlib
import gc
import os
import socket
import threading

import pytest
import torch

from echelon.backends.connect import acceptor
from echelon.backends.connect.members import Job
from echelon.backends.connect.sockets import Sockets
from echelon.backends.tcp.backend import TcpBackend
from echelon.errors import AuthenticationError, ConnectError, ProtocolError
from tests.helpers.worlds import (
    MAGIC,
    SECRET,
    connect_all,
    dial,
    free_address,
    hello,
    one_that_joins,
    proof,
    prove,
    receive,
    receive_json,
    send_json,
    start,
)

SECONDS = 20.0


@pytest.fixture
def connect():
    """Connects to a rank 0 of two that waits; afterwards, those connections still open, rank 1 comes and both talk."""
    connections = []
    with free_address() as address:
        joining = start(lambda: TcpBackend(0, 2, address, secret=SECRET, connect_timeout=SECONDS))

        def connect():
            connections.append(dial(address))
            return connections[-1]

        yield connect
        with TcpBackend(1, 2, address, secret=SECRET, connect_timeout=SECONDS) as one, joining() as zero:
            one.messages.send(torch.ones(1), 0, timeout=SECONDS)
            assert zero.messages.recv(1, timeout=SECONDS).item() == 1
        for connection in connections:
            connection.close()


def assert_hung_up(connection):
    connection.settimeout(SECONDS)
    with contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""


def test_a_stranger_that_says_nothing_keeps_nobody_out(connect):
    """It is greeted like anyone, and neither waited for nor sent away at once; the ranks meet when the fixture ends."""
    connection = connect()
    assert len(receive(connection, 40)) == 40
    connection.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        connection.recv(1)


def test_a_stranger_that_says_nothing_is_sent_away_in_the_end(connect, monkeypatch):
    monkeypatch.setattr(acceptor, "STRANGER_SECONDS", 0.1)
    connection = connect()
    receive(connection, 40)
    assert_hung_up(connection)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n".ljust(72), bytes(1 << 20)])
def test_a_stranger_that_says_garbage_is_hung_up_on(connect, said):
    connection = connect()
    receive(connection, 40)
    try:
        connection.sendall(said)
    except ConnectionError:
        return
    assert_hung_up(connection)


def test_a_flood_of_strangers_keeps_nobody_out(connect):
    strangers = [connect() for _ in range(200)]
    assert threading.active_count() < 50
    for stranger in strangers:
        stranger.close()


def test_of_a_flood_that_stays_the_newest_are_held(connect, monkeypatch):
    monkeypatch.setattr(acceptor, "_MAX_STRANGERS", 8)
    strangers = []
    for _ in range(30):  # one after the other has been accepted
        strangers.append(connect())
        receive(strangers[-1], 40)
    for stranger in strangers[:20]:
        assert_hung_up(stranger)
    assert all(is_open(stranger) for stranger in strangers[20:])


def test_strangers_that_keep_coming_keep_nobody_out(monkeypatch):
    """They took every place for as long as they were allowed to say nothing."""
    monkeypatch.setattr(acceptor, "_MAX_STRANGERS", 32)
    ended = threading.Event()
    strangers = []

    def keep_coming(address):
        host, port = address.split(":")
        while not ended.is_set() and len(strangers) < 400:
            with contextlib.suppress(OSError):  # nobody listens any more
                strangers.append(socket.create_connection((host, int(port)), 1.0))

    with free_address() as address:
        joining = start(lambda: TcpBackend(0, 2, address, secret=SECRET, connect_timeout=5.0))
        strangers += [dial(address) for _ in range(40)]
        flood = start(keep_coming, address)
        try:
            with TcpBackend(1, 2, address, secret=SECRET, connect_timeout=5.0) as one, joining() as zero:
                one.messages.send(torch.ones(1), 0, timeout=SECONDS)
                assert zero.messages.recv(1, timeout=SECONDS).item() == 1
        finally:
            ended.set()
            flood()
            for stranger in strangers:
                stranger.close()


def leave_the_hall_when_somebody_comes(turns):
    """Leaves so many turns of the event loop after a stranger has come."""

    async def leave():
        with Sockets() as sockets, socket.socket() as stranger:
            listener = await sockets.listen("127.0.0.1", 0)
            async with acceptor.PeerAcceptor(Job(0, 2, SECRET), sockets, listener):
                await asyncio.sleep(0.01)
                stranger.connect(listener.getsockname())
                for _ in range(turns):
                    await asyncio.sleep(0)

    asyncio.run(leave())


@pytest.mark.parametrize("turns", range(5))
def test_who_comes_while_the_hall_is_left_is_hung_up_on(turns, recwarn):
    """A connection that was accepted just then belonged to nobody, and warned of that when it was found."""
    leave_the_hall_when_somebody_comes(turns)
    gc.collect()
    assert [str(warning.message) for warning in recwarn if warning.category is ResourceWarning] == []


def is_open(connection):
    if connection.fileno() < 0:
        return False
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


def test_a_wrong_proof_gets_a_no_and_nothing_else(connect):
    connection = connect()
    assert prove(connection, b"not the secret")[0] == b"\x00"
    assert_hung_up(connection)


def test_a_recorded_proof_is_worth_nothing(connect):
    verdict, recorded = prove(connect())
    assert verdict == b"\x01"
    second = connect()
    receive(second, 40)
    second.sendall(recorded)
    assert receive(second, 1) == b"\x00"
    assert_hung_up(second)


def test_our_own_challenge_mirrored_back_is_worth_nothing(connect):
    """Nonces may be equal; the proof still needs the secret."""
    connection = connect()
    challenge = receive(connection, 40)
    connection.sendall(challenge + proof(b"guessed", b"connector", challenge[8:], challenge[8:]))
    assert receive(connection, 1) == b"\x00"
    assert_hung_up(connection)


def test_what_listens_as_rank_0_must_know_the_secret_too():
    with one_that_joins() as (connection, joining):
        connection.sendall(MAGIC + bytes(32))
        theirs = receive(connection, 72)
        connection.sendall(b"\x01" + theirs[40:])  # mirrors the connector's own proof
        with pytest.raises(AuthenticationError, match="the process that listens as rank 0 does not know the secret"):
            joining()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"ECHELON\x01" + bytes(32), "speaks version 1 of the protocol, this one 2: install the same"),
        (b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n", "does not speak Echelon's protocol: check address and port"),
    ],
)
def test_another_protocol_is_named(said, reason):
    with one_that_joins() as (connection, joining):
        connection.sendall(said)
        with pytest.raises(ProtocolError, match=reason):
            joining()


def test_a_wrong_secret_is_named_on_both_sides():
    with free_address() as address:
        zero = start(lambda: TcpBackend(0, 2, address, secret=b"one", connect_timeout=1.0))
        with pytest.raises(AuthenticationError, match="rank 0 refused our secret: give every rank the same"):
            TcpBackend(1, 2, address, secret=b"another", connect_timeout=SECONDS)
        with pytest.raises(ConnectError, match=r"rank 1 of 2 did not come within 1 s.*1 connections without the right"):
            zero()


def test_without_a_secret_the_error_says_how_to_set_it(monkeypatch):
    for value in ("", None):
        monkeypatch.delenv("ECHELON_SECRET", raising=False)
        if value is not None:
            monkeypatch.setenv("ECHELON_SECRET", value)
        with pytest.raises(AuthenticationError, match=r"no secret: start the ranks with `echelon run`, set ECHELON_SE"):
            TcpBackend(0, 2, "127.0.0.1:1")
    with pytest.raises(AuthenticationError):
        TcpBackend(0, 2, "127.0.0.1:1", secret=b"")


def test_the_secret_is_taken_from_the_environment(monkeypatch):
    monkeypatch.setenv("ECHELON_SECRET", "from the environment")
    with free_address() as address:
        world = connect_all(2, address, secret=None)
    assert [(backend.rank, backend.world_size) for backend in world] == [(0, 2), (1, 2)]
    for backend in world:
        backend.abort("enough")


def test_the_secret_is_not_shown():
    assert "secret" not in repr(Job(0, 2, b"a secret"))


# With the secret, and still not one of us


@pytest.mark.parametrize(
    ("greeting", "answer"),
    [
        (hello(world_size=3), "of 3 ranks; this is run '', restart 0, of 2"),
        (hello(run_id="other"), "it belongs to run 'other', restart 0"),
        (hello(restart=4), "restart 4, of 2 ranks; this is"),
        (hello(rank=2), "there is no rank 2 in a world of 2"),
        (hello(rank=-1), "rank=-1"),
        (hello(rank="1"), "rank='1'"),
        (hello(rank=None), "rank=None"),
        (hello(rank=0), "rank 0 is taken by process"),
        (hello(port=70000), "port 70000"),
        (hello(pid=-5), "pid=-5"),
        (hello(pid=1 << 40), "no such numbers"),
        (hello(machine=None), "without host or machine"),
        ({}, "it belongs to run None"),
    ],
)
def test_a_greeting_that_is_not_of_this_job_is_refused_and_told_why(connect, greeting, answer):
    connection = connect()
    prove(connection)
    send_json(connection, greeting)
    assert answer in receive_json(connection)["error"]
    assert_hung_up(connection)


@pytest.mark.parametrize(
    "greeting",
    [
        (1 << 30).to_bytes(4, "little"),
        b"\x03\0\0\0{[}",
        b"\x02\0\0\0[]",
        b"\x02\0\0\0\xff\xfe",
        (1 << 20).to_bytes(4, "little") + b"[" * (1 << 20),
    ],
    ids=["oversize", "broken", "no object", "no text", "a million brackets"],
)
def test_a_greeting_that_is_no_json_object_is_hung_up_on(connect, greeting):
    connection = connect()
    prove(connection)
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # hung up on in the middle of it
        connection.sendall(greeting)
    assert_hung_up(connection)


def test_a_second_process_with_the_same_rank_is_refused_and_the_first_stays():
    with free_address() as address:
        zero = start(lambda: TcpBackend(0, 3, address, secret=SECRET, connect_timeout=1.0))
        with dial(address) as first:
            prove(first)
            send_json(first, hello(rank=1, world_size=3, pid=4321))
            with dial(address) as probe:  # answered after the first, so that is in
                prove(probe)
                send_json(probe, hello(rank=9, world_size=3))
                receive_json(probe)
            with pytest.raises(ConnectError, match="rank 1 of 3 was refused: rank 1 is taken by process 4321"):
                TcpBackend(1, 3, address, secret=SECRET, connect_timeout=SECONDS)
            with pytest.raises(ConnectError, match=r"rank 2 of 3 did not come within 1 s, ranks 0 and 1 did"):
                zero()
            assert "rank 2 of 3 did not come" in receive_json(first)["error"]


def test_this_process_is_named_as_the_one_that_has_the_rank(connect):
    connection = connect()
    prove(connection)
    send_json(connection, hello(rank=0))
    assert (
        f"rank 0 is taken by process {os.getpid()}; give every process its own rank"
        in (receive_json(connection)["error"])
    )
