import os
import shutil
import socket
import subprocess
import sys

import pytest

from echelon.errors import LaunchError
from echelon.launch import environment, variables
from echelon.launch.run import rank_environs
from echelon.launch.variables import ReservedPort, threads_per_rank
from tests.helpers import rank_functions

NOBODYS = "192.0.2.1"
"""An address that no host has (RFC 5737)."""


def listener(port, *options):
    server = socket.socket()
    for option in options:
        server.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        server.bind(("127.0.0.1", port))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


def test_a_reserved_port_is_kept_for_the_rank_that_asks_for_it():
    with ReservedPort() as port:
        with pytest.raises(OSError):
            listener(port.port)
        server = listener(port.port, socket.SO_REUSEADDR, socket.SO_REUSEPORT)
        with server, socket.create_connection(("127.0.0.1", port.port), timeout=5):
            server.settimeout(5)
            server.accept()[0].close()


def test_a_store_of_torch_can_listen_on_a_reserved_port():
    from torch.distributed import TCPStore

    with ReservedPort() as port:
        assert TCPStore("127.0.0.1", port.port, is_master=True, wait_for_workers=False).port == port.port


def test_a_port_of_a_lingering_connection_is_not_reserved(monkeypatch):
    """`echelon run` took a connection of another program, from before, for one of its ranks."""
    asked = []
    monkeypatch.setattr(variables, "is_in_use", lambda port: asked.append(port) or len(asked) < 3)
    with ReservedPort() as port:
        assert port.port == asked[-1]
    assert len(asked) == 3


def test_ports_differ_and_are_given_back():
    with ReservedPort() as first, ReservedPort() as second:
        assert first.port != second.port
    listener(first.port).close()


def test_every_rank_gets_at_least_one_thread(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert [threads_per_rank(ranks) for ranks in (1, 2, 4, 6, 100)] == [6, 3, 1, 1, 1]


def test_a_host_with_ipv6_alone_uses_that(monkeypatch):
    """The launcher ended with a raw OSError."""
    monkeypatch.setattr(variables, "LOOPBACK", NOBODYS)
    assert variables.loopback() == "::1"
    with ReservedPort() as port:
        assert port.address == f"[::1]:{port.port}"
        environs = rank_environs(2, port, {})
    assert [(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in environs] == [("::1", str(port.port))] * 2
    assert environment.read(environs[0]).address == port.address


def test_ranks_meet_on_a_host_with_ipv6_alone(monkeypatch, pool):
    monkeypatch.setattr(variables, "LOOPBACK", NOBODYS)
    assert pool.run(rank_functions.who, 2) == [(0, 2), (1, 2)]


def test_a_host_without_a_loopback_address_is_told_how_to_get_one(monkeypatch):
    monkeypatch.setattr(variables, "LOOPBACK", NOBODYS)
    monkeypatch.setattr(variables, "LOOPBACK_V6", NOBODYS)
    with pytest.raises(
        LaunchError, match=r"no loopback address \(192.0.2.1: .*set the interface up with `ip link set lo"
    ):
        ReservedPort()


@pytest.mark.slow
def test_the_launcher_runs_in_a_network_that_has_ipv6_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import echelon\nprint(echelon.init(backend='tcp').all_gather_object(1))\n")
    entered = 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "$@"'
    unshare = ["unshare", "--net", "sh", "-c", entered, "sh"]
    if (
        os.geteuid() != 0
        or not shutil.which("ip")
        or subprocess.run([*unshare, "true"], capture_output=True).returncode
    ):
        pytest.skip("needs root, ip and network namespaces")
    command = [*unshare, sys.executable, "-m", "echelon", "run", "-n", "2", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert sorted(ended.stdout.splitlines()) == ["[0] [1, 1]", "[1] [1, 1]"], ended.stderr
