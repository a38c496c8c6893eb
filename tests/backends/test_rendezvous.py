"""How ranks find each other, and what is left when they do not."""

import asyncio
import contextlib
import gc
import json
import os
import pathlib
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from echelon.backends.connect import handshake
from echelon.backends.connect.members import split_address
from echelon.backends.tcp.backend import TcpBackend
from echelon.errors import ConnectError, InvalidRank, InvalidWorldSize, ProtocolError
from tests.helpers.worlds import (
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
    tcp_world,
)

SECONDS = 20.0


@pytest.fixture
def nothing_left():
    """Fails the test if it leaves a thread or an open file behind."""
    gc.collect()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    yield
    gc.disable()  # what a collection would close was not closed
    try:
        assert threading.active_count() == threads
        assert len(os.listdir("/proc/self/fd")) == files
    finally:
        gc.enable()


def listening():
    """Returns (address, port) of every TCP socket on which this process listens, as /proc has them."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = set()
    for line in pathlib.Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
        if state == "0A" and f"socket:[{inode}]" in mine:
            address, port = local.split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def talk(backend):
    other = (backend.rank + 1) % backend.world_size
    send = backend.messages.isend(torch.tensor([backend.rank]), other)
    got = backend.messages.recv((backend.rank - 1) % backend.world_size, timeout=SECONDS).item()
    send.wait(SECONDS)
    backend.messages.barrier(SECONDS)
    return got


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ranks_meet_in_any_order(world_size):
    with tcp_world(world_size) as world, ThreadPoolExecutor(world_size) as threads:
        assert list(threads.map(talk, world)) == [(rank - 1) % world_size for rank in range(world_size)]


def test_others_wait_until_rank_0_listens():
    with free_address() as address:
        early = start(lambda: TcpBackend(1, 2, address, secret=SECRET, connect_timeout=SECONDS))
        with pytest.raises(AssertionError, match="still runs"):
            early(timeout=0.1)
        with TcpBackend(0, 2, address, secret=SECRET, connect_timeout=SECONDS) as zero, early() as one:
            one.messages.send(torch.ones(1), 0, timeout=SECONDS)
            zero.messages.recv(1, timeout=SECONDS)


@pytest.mark.usefixtures("nothing_left")
def test_a_missing_rank_is_named_on_all_that_came():
    with free_address() as address:

        def join(rank):
            return TcpBackend(rank, 4, address, secret=SECRET, connect_timeout=0.5)

        messages = []
        for joining in [start(join, rank) for rank in (0, 1, 3)]:
            with pytest.raises(ConnectError) as caught:
                joining()
            messages.append(str(caught.value))
        for message in messages:
            assert (
                "rank 2 of 4 did not come within 0.5 s, ranks 0, 1 and 3 did: start the missing ones within that time"
                in message
            )
            assert "\n" not in message
        del caught, joining


@pytest.mark.usefixtures("nothing_left")
def test_without_rank_0_the_address_is_named():
    with (
        free_address() as address,
        pytest.raises(
            ConnectError, match=rf"rank 0 did not answer at {re.escape(address)} in time \(Connection refused\): is it"
        ),
    ):
        TcpBackend(1, 2, address, secret=SECRET, connect_timeout=0.2)


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_0_that_accepts_and_says_nothing_is_named():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(ConnectError, match=r"rank 0 did not answer .*it did not finish the handshake"),
    ):
        TcpBackend(1, 2, f"127.0.0.1:{server.getsockname()[1]}", secret=SECRET, connect_timeout=0.2)


def test_worlds_of_two_sizes_are_told_apart():
    with free_address() as address:
        zero = start(lambda: TcpBackend(0, 2, address, secret=SECRET, connect_timeout=0.5))
        with pytest.raises(ConnectError, match=r"rank 1 of 3 was refused: it belongs to .* of 3 ranks; this is"):
            TcpBackend(1, 3, address, secret=SECRET, connect_timeout=SECONDS)
        with pytest.raises(ConnectError, match="rank 1 of 2 did not come"):
            zero()


@pytest.mark.parametrize("options", [{"run_id": "b"}, {"restart": 1}])
def test_another_run_or_restart_is_refused(options):
    with free_address() as address:
        zero = start(lambda: TcpBackend(0, 2, address, secret=SECRET, connect_timeout=0.5, run_id="a"))
        with pytest.raises(ConnectError, match="this is run 'a', restart 0"):
            TcpBackend(1, 2, address, secret=SECRET, connect_timeout=SECONDS, **({"run_id": "a"} | options))
        with pytest.raises(ConnectError):
            zero()


def test_every_rank_listens_only_on_the_address_given():
    before = listening()
    with free_address("127.0.0.3") as address:
        port = int(address.rpartition(":")[2])
        joining = [
            start(lambda rank=rank: TcpBackend(rank, 3, address, secret=SECRET, connect_timeout=SECONDS))
            for rank in range(2)
        ]
        with dial(address) as probe:  # rank 0 listens
            assert probe.getpeername() == ("127.0.0.3", port)
        while len(opened := listening() - before) < 2:  # and rank 1, for rank 2
            pass
        assert {host for host, _ in opened} <= {"127.0.0.3", "127.0.0.1"}
        assert ("127.0.0.3", port) in opened
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), SECONDS)
        joining.append(start(lambda: TcpBackend(2, 3, address, secret=SECRET, connect_timeout=SECONDS)))
        for join in joining:
            join().abort("enough")
    assert not (listening() - before), "a rank still listens after all have met"


def test_ipv6():
    with free_address("::1") as address:
        world = connect_all(3, address)
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(talk, world)) == [2, 0, 1]
        for backend in world:
            backend.close()


def test_a_chosen_address_is_the_only_one_that_is_listened_on_and_dialled_from():
    with free_address("127.0.0.3") as address:
        before = listening()
        zero = start(lambda: TcpBackend(0, 3, address, secret=SECRET, local_address="127.0.0.3"))
        one = start(lambda: TcpBackend(1, 3, address, secret=SECRET, local_address="127.0.0.4"))
        with dial(address) as probe:  # rank 0 listens
            receive(probe, 40)
        assert {host for host, _ in listening() - before} <= {"127.0.0.3", "127.0.0.4"}
        world = [TcpBackend(2, 3, address, secret=SECRET, local_address="127.0.0.5"), zero(), one()]
        hosts = [member.host for member in world[0].members]
        for backend in world:
            backend.abort("enough")
    assert hosts == ["127.0.0.3", "127.0.0.4", "127.0.0.5"]


def test_the_first_address_of_a_name_that_answers_is_taken(monkeypatch):
    """Such as ::1 of a rank 0 that listens on 127.0.0.1."""
    with free_address() as address:
        port = int(address.rpartition(":")[2])
        resolve = socket.getaddrinfo

        def both(host, *arguments, **options):
            found = resolve("127.0.0.1", *arguments, **options)
            six = (socket.AF_INET6, *found[0][1:4], ("::1", port, 0, 0))
            return [six, *found] if host == "rank-0" else resolve(host, *arguments, **options)

        monkeypatch.setattr(socket, "getaddrinfo", both)
        zero = start(lambda: TcpBackend(0, 2, address, secret=SECRET, connect_timeout=SECONDS))
        one = TcpBackend(1, 2, f"rank-0:{port}", secret=SECRET, connect_timeout=SECONDS)
        for backend in (one, zero()):
            backend.abort("enough")


def test_ipv6_addresses_are_printed_in_brackets():
    with (
        free_address("::1") as address,
        pytest.raises(ConnectError, match=rf"rank 0 did not answer at {re.escape(address)} in time"),
    ):
        TcpBackend(1, 2, address, secret=SECRET, connect_timeout=0.1)
    with pytest.raises(ConnectError, match=r"cannot listen on \[2001:db8::1\]:29500"):
        TcpBackend(0, 2, "[2001:db8::1]:29500", secret=SECRET)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("shares", [False, True], ids=["a server", "another rank 0"])
def test_a_port_in_use_gets_one_line(shares):
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shares)
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConnectError, match=f"cannot listen on {address} .*: give a free port") as caught:
            TcpBackend(0, 2, address, secret=SECRET, connect_timeout=SECONDS)
        assert "\n" not in str(caught.value)
        del caught


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("192.0.2.77:29500", "cannot listen on 192.0.2.77:29500"),
        ("no-such-host.invalid:29500", "cannot listen on no-such-host.invalid:29500"),
        ("localhost", 'is not "host:port": use for example'),
        ("localhost:70000", 'is not "host:port"'),
        ("localhost:²", 'is not "host:port"'),
    ],
)
def test_an_address_that_cannot_be_gets_one_line(address, reason):
    with pytest.raises(ConnectError, match=re.escape(reason)) as caught:
        TcpBackend(0, 2, address, secret=SECRET, connect_timeout=SECONDS)
    assert "\n" not in str(caught.value)


def test_a_host_that_is_not_known_yet_is_tried_until_the_deadline():
    with pytest.raises(ConnectError, match=r"rank 0 did not answer at no-such-host\.invalid:29500 in time"):
        TcpBackend(1, 2, "no-such-host.invalid:29500", secret=SECRET, connect_timeout=0.2)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[::1]:29500", ("::1", 29500)),
        ("node-1:5", ("node-1", 5)),
        (":5", ("127.0.0.1", 5)),
    ],
)
def test_addresses(address, parts):
    assert split_address(address) == parts


@pytest.mark.parametrize(
    ("rank", "world_size", "error"), [(0, 0, InvalidWorldSize), (2, 2, InvalidRank), (-1, 2, InvalidRank)]
)
def test_numbers_that_cannot_be_are_refused_before_anything_is_opened(rank, world_size, error):
    with pytest.raises(error):
        TcpBackend(rank, world_size, "127.0.0.1:1", secret=SECRET)


def test_ranks_meet_inside_a_running_event_loop():
    async def main():
        with free_address() as address:
            one = start(lambda: TcpBackend(1, 2, address, secret=SECRET, connect_timeout=SECONDS))
            with TcpBackend(0, 2, address, secret=SECRET, connect_timeout=SECONDS) as zero, one() as one:
                one.messages.send(torch.tensor(5), 0, timeout=SECONDS)
                return zero.messages.recv(1, timeout=SECONDS).item()

    assert asyncio.run(main()) == 5


# Ranks that fail while the others meet


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_died_after_it_came_fails_the_others_quickly():
    """Rank 1 came, was put into the table, and is gone when rank 2 dials it."""
    with free_address() as address:
        zero = start(lambda: TcpBackend(0, 3, address, secret=SECRET, connect_timeout=SECONDS))
        with socket.socket() as unused, dial(address) as first:
            unused.bind(("127.0.0.1", 0))
            prove(first)
            send_json(first, hello(rank=1, world_size=3, port=unused.getsockname()[1]))
            with pytest.raises(ConnectError, match="rank 1 ended before all ranks had met") as caught:
                TcpBackend(2, 3, address, secret=SECRET, connect_timeout=SECONDS)
            del caught
            receive_json(first)
        zero().abort("enough")


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"members": 3},
        {"members": [1, 2]},
        {"members": [{"rank": 0}, {"rank": 1}]},
        {"members": [hello(rank=1) | {"host": "a"}, hello(rank=0) | {"host": "a"}]},
        {"members": [hello(rank=0) | {"host": "a"}, hello(rank=1, port=1 << 20) | {"host": "a"}]},
    ],
)
@pytest.mark.usefixtures("nothing_left")
def test_a_table_that_cannot_be_is_a_protocol_error(table):
    with one_that_joins() as (connection, joining):
        accept(connection)
        receive_json(connection)
        send_json(connection, table)
        with pytest.raises(ProtocolError) as caught:
            joining()
        del caught, joining


def test_a_table_of_members_may_be_as_long_as_the_world_needs():
    """It had 1 MiB, whatever the world: enough for about 6,000 ranks."""
    world_size = 10_000
    entry = hello() | {"host": "fd00::1234:5678:9abc:def0"}
    table = {"members": [entry | {"rank": rank} for rank in range(world_size)]}
    length = len(json.dumps(table))
    assert length > 1 << 20

    async def read(max_bytes):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            sending = asyncio.create_task(handshake.send_json(theirs, table))
            try:
                return await handshake.receive_json(ours, max_bytes)
            finally:
                sending.cancel()

    limit = handshake.MAX_HELLO_BYTES + world_size * handshake.MAX_ENTRY_BYTES
    assert len(asyncio.run(read(limit))["members"]) == world_size
    with pytest.raises(ProtocolError, match=f"a hello of {length} bytes exceeds the limit of 1048576"):
        asyncio.run(read(1 << 20))


def accept(connection):
    """Plays the acceptor's side of the handshake, with the secret."""
    ours = bytes(32)
    connection.sendall(b"ECHELON\x02" + ours)
    answer = receive(connection, 72)
    connection.sendall(b"\x01" + proof(SECRET, b"acceptor", answer[8:40], ours))


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_0_that_ends_before_all_have_met_is_named():
    with one_that_joins() as (connection, joining):
        accept(connection)
        receive_json(connection)
        connection.close()
        with pytest.raises(ConnectError, match="rank 0 answered but ended before all ranks had met") as caught:
            joining()
        del caught, joining


# Through a store


class _Store:
    """A store like torch's, in this process."""

    def __init__(self):
        self.entries = {}

    def set(self, key, value):
        self.entries[key] = value.encode()

    def get(self, key):
        return self.entries[key]

    def check(self, keys):
        return set(keys) <= set(self.entries)


def join_store(store, rank, world_size, **options):
    return TcpBackend.from_store(
        rank, world_size, store, "127.0.0.1", secret=SECRET, connect_timeout=SECONDS, **options
    )


def test_ranks_meet_through_a_store():
    store = _Store()
    joining = [start(lambda rank=rank: join_store(store, rank, 3)) for rank in range(3)]
    world = [join() for join in joining]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(talk, world)) == [2, 0, 1]
    for backend in world:
        backend.close()


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_missing_in_the_store_is_named():
    with pytest.raises(ConnectError, match=r"ranks 0 and 2 of 3 did not come within 0\.1 s, rank 1 did"):
        TcpBackend.from_store(1, 3, _Store(), "127.0.0.1", secret=SECRET, connect_timeout=0.1)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("entry", [b"", b"{", b"[]", b'{"rank": 0}'])
def test_a_store_with_rubbish_in_it_is_a_protocol_error(entry):
    store = _Store()
    store.entries["echelon/x/0/0"] = entry
    with pytest.raises(ProtocolError):
        join_store(store, 1, 2, run_id="x")
