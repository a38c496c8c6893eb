"""Sockets of a rendezvous: every socket is closed at the end unless it was released."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Any

from echelon.backends.connect.interfaces import family_of
from echelon.backends.connect.members import join_address
from echelon.errors import ConnectError

_BIND_ADDRESS_NO_PORT = 24
"""IP_BIND_ADDRESS_NO_PORT, for which Python 3.11 has no name. The port is chosen by `connect`, so it need only be free
for that destination."""


def is_loopback(own: str, theirs: str) -> bool:
    """Whether a connection between two addresses stays in one network namespace.

    A host connects to one of its own addresses from the same address, or within 127.0.0.0/8.
    """
    return own == theirs or (own.startswith("127.") and theirs.startswith("127."))


class Sockets:
    """Owner of all sockets that it opened or was given; leaving the context closes all that were not released."""

    def __init__(self, local_address: str | None = None) -> None:
        """Takes the address of this host to dial from; None: the one that the way there begins with."""
        self._owned: set[socket.socket] = set()
        self._local_address = local_address

    def own(self, sock: socket.socket) -> socket.socket:
        """Takes charge of a socket, makes it non-blocking and returns it."""
        sock.setblocking(False)
        self._owned.add(sock)
        return sock

    def close(self, sock: socket.socket) -> None:
        """Closes a socket and gives up its ownership."""
        self._owned.discard(sock)
        sock.close()

    def release(self, sockets: Iterable[socket.socket]) -> None:
        """Gives up ownership of sockets, which stay open."""
        self._owned.difference_update(sockets)

    async def connect(self, host: str, port: int) -> socket.socket:
        """Opens a connection to the first of a host's addresses that answers; raises OSError if none does."""
        problem = OSError(f"{host} has no address")
        for family, kind, proto, _, address in await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        ):
            try:
                return await self._connect(socket.socket(family, kind, proto), address)
            except OSError as error:
                problem = error
        raise problem

    async def _connect(self, sock: socket.socket, address: Any) -> socket.socket:
        self.own(sock)
        try:
            if self._local_address is not None and family_of(self._local_address) == sock.family:
                sock.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
                sock.bind((self._local_address, 0))
            await asyncio.get_running_loop().sock_connect(sock, address)
            if sock.getsockname() == sock.getpeername():  # TCP can connect a free port to itself
                raise ConnectionRefusedError("no process listens there")
        except BaseException:
            self.close(sock)
            raise
        return sock

    async def listen(self, host: str, port: int, *, shared: bool = False) -> socket.socket:
        """Listens on exactly this address.

        Args:
            host: of this machine.
            port: 0 for a free one.
            shared: also when a launcher holds the port bound to keep it free for us, but not when anybody listens.

        Raises:
            ConnectError: the address cannot be bound, or another process listens there.
        """
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, proto, _, address = found[0]
            listener = self.own(socket.socket(family, kind, proto))
            # A restarted job gets its port although connections of the last one are still in TIME_WAIT.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            # SO_REUSEPORT would let a second job listen here unnoticed, so it first tries whether anybody answers.
            if shared and await self._is_taken(host, port):
                raise OSError(0, "another process listens there")
            listener.listen(1024)  # ranks dial at about the same time
        except OSError as error:
            raise ConnectError(
                f"cannot listen on {join_address(host, port)} ({error.strerror}): give a free port of this host, "
                "and start rank 0 only once"
            ) from error
        return listener

    async def _is_taken(self, host: str, port: int) -> bool:
        try:
            self.close(await self.connect(host, port))
        except OSError:
            return False
        return True

    def __enter__(self) -> Sockets:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._owned:
            sock.close()
