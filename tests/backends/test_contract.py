"""Every backend keeps the one contract."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from echelon.backends.simulated import SimulatedBackend
from echelon.backends.tcp import TcpBackend
from echelon.testing import check_backend, clause_names


def tcp_world(world_size):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        with ThreadPoolExecutor(world_size) as pool:
            return list(
                pool.map(
                    lambda rank: TcpBackend(rank, world_size, address, secret=b"s", connect_timeout=20),
                    range(world_size),
                )
            )


@pytest.mark.parametrize("clause", clause_names())
@pytest.mark.parametrize("make_world", [SimulatedBackend.create_group, tcp_world], ids=["simulated", "tcp"])
def test_keeps_clause(make_world, clause):
    check_backend(make_world, [clause])
