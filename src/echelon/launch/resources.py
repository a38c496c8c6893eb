"""What this host gives to the ranks that are started on it: a free port and a share of the cores."""

from __future__ import annotations

import os
import socket

LOOPBACK = "127.0.0.1"


class ReservedPort:
    """Keeps a free TCP port on the loopback address for a rank that will listen on it.

    The socket is bound but never listens, so it takes no connection; with SO_REUSEPORT on both sides the rank can
    bind the same port while this one is held, and nobody else gets it in between.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
        self._socket.bind((LOOPBACK, 0))
        self.port: int = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        """The address as "host:port"."""
        return f"{LOOPBACK}:{self.port}"

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def threads_per_rank(num_ranks: int) -> int:
    """Returns how many threads each of `num_ranks` ranks may use without competing for the cores of this host."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)
