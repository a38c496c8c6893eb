"""How an open file goes from one process to another of the same host: over an abstract Unix socket.

Strategy. The giver listens under a name that nobody can guess, and tells name and token over a connection that both
ends have proved themselves on already. Who dials must be a process that the giver expects, as the kernel says
(SO_PEERCRED), and must know the token. A stranger is hung up on, without waiting for what it says. Nothing here waits
longer than it is told to.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Sequence

from echelon.errors import AuthenticationError, ConnectError

TOKEN_BYTES = 32
_FDS_AT_ONCE = 250
"""The kernel takes 253 with one message."""
_CREDENTIALS = struct.Struct("3i")


class FdServer:
    """The end that has the file."""

    def __init__(self, fds: Sequence[int], num_takers: int) -> None:
        """Listens, under a new name, for so many processes that are to get `fds`."""
        self.name = f"echelon-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._fds = fds
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(num_takers + 16)

    def give(self, pids: Iterable[int], timeout: float) -> None:
        """Gives the files once for each of these processes, which have dialled already.

        Raises:
            ConnectError: one did not come within `timeout` seconds.
        """
        missing = list(pids)
        deadline = time.monotonic() + timeout
        while missing:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise ConnectError(f"processes {missing} did not come for the shared memory") from None
            with connection:
                if (pid := _caller(connection)) in missing and self._knows_token(connection, deadline):
                    for start in range(0, len(self._fds), _FDS_AT_ONCE):
                        socket.send_fds(connection, [b"\1"], self._fds[start : start + _FDS_AT_ONCE])
                    missing.remove(pid)

    def _knows_token(self, connection: socket.socket, deadline: float) -> bool:
        try:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            said = connection.recv(TOKEN_BYTES, socket.MSG_WAITALL)
        except OSError:
            return False
        return hmac.compare_digest(said, self.token)

    def close(self) -> None:
        """Stops to listen."""
        self._listener.close()


def dial(name: str, token: bytes, giver: int, timeout: float) -> socket.socket:
    """Dials a giver and says the token; does not wait for the answer.

    Args:
        name, token: what the giver told.
        giver: its process.
        timeout: seconds for this, and for `take`.

    Raises:
        ConnectError: it cannot be reached.
        AuthenticationError: another process listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(f"\0{name}")
        if _caller(connection) != giver:
            raise AuthenticationError(f"another process than {giver} listens for those who want its shared memory")
        connection.sendall(token)
    except OSError as error:
        connection.close()
        if isinstance(error, AuthenticationError):
            raise
        raise ConnectError(f"process {giver} cannot be reached over a Unix socket: {error}") from error
    return connection


def take(connection: socket.socket, count: int) -> list[int]:
    """Returns the `count` files that the giver sends; closes the connection.

    Raises:
        ConnectError: they did not come.
    """
    taken: list[int] = []
    try:
        with connection:
            while len(taken) < count:
                _, fds, _, _ = socket.recv_fds(connection, 1, min(count - len(taken), _FDS_AT_ONCE))
                taken += fds
                if not fds:
                    raise ConnectError("no shared memory came over the Unix socket: it was closed")
    except OSError as error:
        for fd in taken:
            os.close(fd)
        if isinstance(error, ConnectError):
            raise
        raise ConnectError(f"no shared memory came over the Unix socket: {error}") from error
    for fd in taken:
        os.set_inheritable(fd, False)
    return taken


def _caller(connection: socket.socket) -> int:
    """Returns the process at the other end, 0 if it is another user's."""
    size = _CREDENTIALS.size
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid if user == os.geteuid() else 0
