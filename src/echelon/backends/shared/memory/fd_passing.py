"""Transfer of open files between processes of one host, over an abstract Unix socket.

Strategy. The giver listens under a random name. It tells the takers that name and a token over connections on which
both ends have authenticated. A taker must be an expected process, as the kernel reports it (SO_PEERCRED), and must send
the token. A stranger is hung up on unanswered. Every wait ends at its caller's timeout.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Sequence

from echelon.errors import AuthenticationError, ConnectError

TOKEN_BYTES = 32
# The kernel takes at most 253 with one message (SCM_MAX_FD).
_FDS_AT_ONCE = 250
_PAUSE = 0.005
"""Seconds after which files are sent again where too many were on their way."""
_CREDENTIALS = struct.Struct("3i")


class FdServer:
    """Listening end, which sends the files."""

    def __init__(self, fds: Sequence[int], num_takers: int) -> None:
        """Listens under a new random name.

        Args:
            fds: the files to send.
            num_takers: how many processes will dial.
        """
        self.name = f"echelon-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._fds = fds
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.name}")
        # Slack of 16 for strangers: their dials wait in the same backlog until `give` accepts them and hangs up.
        self._listener.listen(num_takers + 16)

    def give(self, pids: Iterable[int], timeout: float) -> None:
        """Sends the files once to each of `pids`, which must have dialled. Blocks for at most `timeout` seconds.

        Raises:
            ConnectError: one of them did not come in time.
        """
        missing = list(pids)
        deadline = time.monotonic() + timeout
        while missing:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise ConnectError(f"processes {missing} did not fetch the shared memory in time") from None
            with connection:
                # The process is checked before anything is read, so a stranger cannot make this rank wait for its
                # token.
                if (pid := _caller(connection)) in missing and self._knows_token(connection, deadline):
                    for start in range(0, len(self._fds), _FDS_AT_ONCE):
                        _send(connection, self._fds[start : start + _FDS_AT_ONCE], deadline)
                    missing.remove(pid)

    def _knows_token(self, connection: socket.socket, deadline: float) -> bool:
        try:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            said = connection.recv(TOKEN_BYTES, socket.MSG_WAITALL)
        except OSError:
            return False
        # Compares in constant time: the duration does not tell a stranger how much of a guess was right.
        return hmac.compare_digest(said, self.token)

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()


def dial(name: str, token: bytes, giver: int, timeout: float) -> socket.socket:
    """Connects to a giver and sends the token. Does not wait for the answer, which `take` reads.

    Args:
        name, token: from the giver's `FdServer`.
        giver: its process.
        timeout: in seconds, for this call and for `take`.

    Raises:
        ConnectError: the giver cannot be reached.
        AuthenticationError: another process listens under the name.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(f"\0{name}")
        if _caller(connection) != giver:
            raise AuthenticationError(f"another process, not {giver}, listens on its Unix socket for shared memory")
        connection.sendall(token)
    except OSError as error:
        connection.close()
        if isinstance(error, AuthenticationError):
            raise
        raise ConnectError(f"process {giver} cannot be reached over a Unix socket: {error}") from error
    return connection


def take(connection: socket.socket, count: int) -> list[int]:
    """Receives `count` files and closes the connection. Blocks up to the timeout given to `dial`.

    Raises:
        ConnectError: they did not all arrive; the files that did are closed.
    """
    taken: list[int] = []
    try:
        with connection:
            while len(taken) < count:
                _, fds, _, _ = socket.recv_fds(connection, 1, min(count - len(taken), _FDS_AT_ONCE))
                taken += fds
                if not fds:
                    raise ConnectError("the Unix socket was closed before the shared memory came")
    except OSError as error:
        for fd in taken:
            os.close(fd)
        if isinstance(error, ConnectError):
            raise
        raise ConnectError(f"the shared memory did not come over the Unix socket: {error}") from error
    # The kernel installs received files without close-on-exec.
    for fd in taken:
        os.set_inheritable(fd, False)
    return taken


def _send(connection: socket.socket, fds: Sequence[int], deadline: float) -> None:
    while True:
        try:
            socket.send_fds(connection, [b"\1"], fds)
        except OSError as error:
            # All files of a user that were not received yet count against RLIMIT_NOFILE, unless the user is root: with
            # 32 ranks, which get 33 files each, they are more than the usual 1,024.
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE)
        else:
            return


def _caller(connection: socket.socket) -> int:
    """Returns the process at the other end. 0 if it belongs to another user."""
    size = _CREDENTIALS.size
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid if user == os.geteuid() else 0
