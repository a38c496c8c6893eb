"""What this host gives to the ranks that are started on it: a free port and a share of the cores."""

from __future__ import annotations

import os
import socket

from echelon.backends.tcp.interfaces import family_of
from echelon.backends.tcp.members import join_address
from echelon.errors import LaunchError

LOOPBACK, LOOPBACK_V6 = "127.0.0.1", "::1"


def loopback() -> str:
    """Returns the address by which ranks of this host reach each other: IPv4's; IPv6's on a host that has only that.

    Raises:
        LaunchError: the host has neither.
    """
    problems = []
    for address in (LOOPBACK, LOOPBACK_V6):
        try:
            with socket.socket(family_of(address), socket.SOCK_STREAM) as probe:
                probe.bind((address, 0))
        except OSError as error:
            problems.append(f"{address}: {os.strerror(error.errno) if error.errno else error}")
        else:
            return address
    raise LaunchError(
        f"this host has no loopback address ({'; '.join(problems)}), by which its ranks reach each other: set the "
        "interface up with `ip link set lo up`"
    )


class ReservedPort:
    """Keeps a free TCP port on the loopback address for a rank that will listen on it.

    The socket is bound but never listens, so it takes no connection; with SO_REUSEPORT on both sides the rank can
    bind the same port while this one is held, and nobody else gets it in between.
    """

    def __init__(self) -> None:
        self.host = loopback()
        """The loopback address."""
        self._socket = socket.socket(family_of(self.host), socket.SOCK_STREAM)
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
        self._socket.bind((self.host, 0))
        self.port: int = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        """The address as "host:port"; an IPv6 address is put in brackets."""
        return join_address(self.host, self.port)

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def threads_per_rank(num_ranks: int) -> int:
    """Returns how many threads each of `num_ranks` ranks may use without competing for the cores of this host."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)
