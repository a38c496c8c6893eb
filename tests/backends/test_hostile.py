"""Strangers that do what the other tests of the handshake leave out; docs/security.md points here."""

import ast
import os
import select
import socket
import time
from pathlib import Path

import pytest

import echelon
from echelon.backends.connect import acceptor
from echelon.backends.connect.members import machine_id
from echelon.backends.tcp.backend import TcpBackend
from echelon.errors import AuthenticationError
from tests.helpers.worlds import MAGIC, SECRET, dial, free_address, prove, receive, start

SECONDS = 20.0


@pytest.mark.parametrize("knows_the_secret", [False, True])
def test_a_stranger_that_speaks_slowly_has_no_more_time(monkeypatch, knows_the_secret):
    """Each byte comes soon enough; all of them together do not. The same goes for who has proved itself."""
    monkeypatch.setattr(acceptor, "STRANGER_SECONDS", 0.3)
    with free_address() as address:
        zero = start(lambda: TcpBackend(0, 2, address, secret=SECRET, connect_timeout=SECONDS))
        with dial(address) as connection:
            if knows_the_secret:
                prove(connection)
                slowly = (1000).to_bytes(4, "little") + b"{" * 1000
            else:
                receive(connection, 40)
                slowly = MAGIC + bytes(64)
            begun, sent = time.monotonic(), 0
            while not select.select([connection], [], [], 0.05)[0]:
                connection.send(slowly[sent : sent + 1])
                sent += 1
            assert sent < len(slowly) // 2
            assert time.monotonic() - begun < SECONDS / 2
        one = TcpBackend(1, 2, address, secret=SECRET, connect_timeout=SECONDS)
    for backend in (zero(), one):
        backend.abort("the test is over")


class _Store:
    """What somebody has written who can reach torch's store: where they listen, in place of rank 0."""

    def __init__(self, port):
        entry = {"rank": 0, "host": "127.0.0.1", "port": port, "pid": os.getpid(), "machine": machine_id()}
        self._entries = {"echelon//0/0": repr(entry).replace("'", '"').encode()}

    def set(self, key, value):
        self._entries[key] = value.encode()

    def get(self, key):
        return self._entries[key]

    def check(self, keys):
        return set(keys) <= set(self._entries)


def test_a_false_address_in_the_store_leads_to_nobody():
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = _Store(server.getsockname()[1])
        one = start(lambda: TcpBackend.from_store(1, 2, store, "127.0.0.1", secret=SECRET, connect_timeout=SECONDS))
        connection, _ = server.accept()
        with connection:
            connection.sendall(MAGIC + bytes(32))
            theirs = receive(connection, 72)
            assert SECRET not in theirs
            connection.sendall(b"\x01" + bytes(32))
            with pytest.raises(
                AuthenticationError, match="the process that listens as rank 0 does not know the secret"
            ):
                one()


def test_nothing_that_reads_from_peers_can_unpickle():
    """Only what talks to its own child processes imports pickle.

    torch.load is named where a foreseen script's own call of it is replaced: its files are those of the script.
    """
    root = Path(echelon.__file__).parent
    unpickling = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            is_load = isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "marshal.loads")
            if is_load or {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & set(names):
                unpickling.add(str(path.relative_to(root)))
    of_launch = {"launch/spawn.py", "launch/worker.py", "launch/pickling.py"}
    of_children = of_launch | {"foresight/packed.py", "foresight/record/ranks/processes.py"}
    assert unpickling <= of_children | {"foresight/record/files/saved.py"}
