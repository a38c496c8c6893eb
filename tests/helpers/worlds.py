"""Worlds of TCP ranks in one process, and a peer that speaks the protocol by hand so that it can break it."""

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

from echelon.backends.connect.members import machine_id
from echelon.backends.formats.wire import Tag
from echelon.backends.tcp.backend import TcpBackend
from echelon.backends.torch_distributed.backend import TorchBackend, engage
from echelon.backends.torch_distributed.store import PORT_SEQUENCE, meet_at_store
from echelon.group.group import ProcessGroup

SECRET = b"a secret of this test"
MAGIC = b"ECHELON\x02"


@contextlib.contextmanager
def free_address(host="127.0.0.1"):
    """Holds a port bound, as a launcher does, and gives "host:port"."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        port = holder.getsockname()[1]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def connect_all(world_size, address, secret=SECRET, connect_timeout=20.0, **options):
    """Makes all ranks of a world at once; returns them, or the error of each, by rank."""

    def make(rank):
        try:
            return TcpBackend(rank, world_size, address, secret=secret, connect_timeout=connect_timeout, **options)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(make, range(world_size)))


@contextlib.contextmanager
def tcp_world(world_size, **options):
    """Gives the ranks of a world and closes them."""
    with free_address() as address:
        world = connect_all(world_size, address, **options)
    for backend in world:
        if isinstance(backend, Exception):
            raise backend
    try:
        yield world
    finally:
        for backend in world:
            backend.abort("the test is over")


@contextlib.contextmanager
def gloo_world(world_size, *, shares=True, **options):
    """Gives the ranks of a world whose collectives Gloo does, and closes them.

    They agree over shared memory; if `shares` is False, by messages, as ranks of several hosts do.
    """

    def make(tcp):
        if shares:
            return engage(tcp, "gloo", 20.0)
        return TorchBackend(tcp, tcp, "gloo", meet_at_store(tcp, range(world_size), Tag(0, PORT_SEQUENCE), 20.0))

    with tcp_world(world_size, **options) as connected, ThreadPoolExecutor(world_size) as threads:
        world = list(threads.map(make, connected))
        try:
            yield world
        finally:
            for backend in world:
                backend.abort("the test is over")


def on_every_rank(world, act, timeout=20.0):
    """Runs `act(group)` for every backend of a world at once; returns the results."""
    with ThreadPoolExecutor(len(world)) as threads:
        return list(threads.map(lambda backend: act(ProcessGroup(backend, timeout=timeout)), world))


@contextlib.contextmanager
def one_that_joins():
    """Listens as rank 0, lets a rank 1 of two come, and gives the connection to it and what waits for its end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        joining = start(lambda: TcpBackend(1, 2, address, secret=SECRET, connect_timeout=20.0))
        connection, _ = server.accept()
        with connection:
            yield connection, joining


def start(function, *arguments):
    """Runs a function in a thread; call what is returned for its result or its error."""
    outcome = []

    def run():
        try:
            outcome.append((function(*arguments), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join(timeout=20.0):
        thread.join(timeout)
        assert outcome, f"{function} still runs after {timeout} s"
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    return join


def receive(connection, size):
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError(f"{len(data)} of {size} bytes came")
        data += part
    return data


def receive_json(connection):
    return json.loads(receive(connection, int.from_bytes(receive(connection, 4), "little")))


def send_json(connection, value):
    data = json.dumps(value).encode()
    connection.sendall(len(data).to_bytes(4, "little") + data)


def proof(secret, role, first, second):
    return hmac.new(secret, role + first + second, hashlib.sha256).digest()


def dial(address, timeout=20.0):
    """Opens a bare connection, retried until somebody listens."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout)
        except ConnectionRefusedError:
            continue


def prove(connection, secret=SECRET):
    """Plays the connector's side of the handshake; returns the verdict, and the bytes that were sent."""
    challenge = receive(connection, 40)
    assert challenge[:8] == MAGIC
    ours = os.urandom(32)
    sent = MAGIC + ours + proof(secret, b"connector", challenge[8:], ours)
    connection.sendall(sent)
    verdict = receive(connection, 1)
    if verdict == b"\x01":
        assert receive(connection, 32) == proof(secret, b"acceptor", ours, challenge[8:])
    return verdict, sent


def hello(rank=1, world_size=2, **changes):
    return {
        "rank": rank,
        "world_size": world_size,
        "run_id": "",
        "restart": 0,
        "port": 1,
        "pid": os.getpid(),
        "machine": machine_id(),
    } | changes


@contextlib.contextmanager
def rank_0_and_a_bare_peer(**options):
    """Gives rank 0 of two, and the socket of a rank 1 that the test plays itself."""
    with free_address() as address:
        joining = start(lambda: TcpBackend(0, 2, address, secret=SECRET, connect_timeout=20, **options))
        connection = dial(address)
    prove(connection)
    send_json(connection, hello())
    assert len(receive_json(connection)["members"]) == 2
    backend = joining()
    try:
        yield backend, connection
    finally:
        connection.close()
        backend.abort("the test is over")


def header(kind=1, dtype=7, dims=1, note=0, context=0, sequence=0, step=0, payload=4):
    """Packs a frame's header from whatever numbers, here float32[...] with tag 0."""
    return struct.pack("<BBBxHxxQQIxxxxQ", kind, dtype, dims, note, context, sequence, step, payload)
