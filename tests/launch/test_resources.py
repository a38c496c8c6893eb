import os
import socket

import pytest

from echelon.launch.resources import ReservedPort, threads_per_rank


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


def test_ports_differ_and_are_given_back():
    with ReservedPort() as first, ReservedPort() as second:
        assert first.port != second.port
    listener(first.port).close()


def test_every_rank_gets_at_least_one_thread(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert [threads_per_rank(ranks) for ranks in (1, 2, 4, 6, 100)] == [6, 3, 1, 1, 1]
