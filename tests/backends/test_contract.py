"""Every backend keeps the one contract."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from echelon.backends.shared.backend import share
from echelon.backends.simulated import SimulatedBackend
from echelon.backends.tcp.backend import TcpBackend
from echelon.backends.torch_distributed.backend import engage
from echelon.testing import check_backend, clause_names, ranks_in_threads, simulated_ranks


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


def shared_world(world_size):
    connected = tcp_world(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda tcp: share(tcp, required=True, timeout=20.0), connected))


def gloo_world(world_size):
    connected = tcp_world(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda tcp: engage(tcp, "gloo", 20.0), connected))


WORLDS = {
    "simulated": simulated_ranks(),
    "simulated, message by message": simulated_ranks(collectives="messages"),
    "simulated, another seed": simulated_ranks(seed=1),
    "simulated, slow network": simulated_ranks(network="1GbE"),
    "free-running": ranks_in_threads(SimulatedBackend.create_group),
    "tcp": ranks_in_threads(tcp_world),
    "shm": ranks_in_threads(shared_world),
    "gloo": ranks_in_threads(gloo_world),
}


@pytest.mark.parametrize("clause", clause_names())
@pytest.mark.parametrize("world", WORLDS)
def test_keeps_clause(world, clause):
    check_backend(WORLDS[world], [clause])
